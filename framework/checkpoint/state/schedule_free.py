"""What a checkpoint of schedule-free AdamW holds: the weights that are trained, y, and z, from
which the averaged weights follow (`engine/schedule_free.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

AHEAD_KEY: Final = "z"
"""Key of z among the state of a weight."""
KIND: Final = "schedule_free"
"""`optimizer.kind` of a run config."""


def averaged(trained: torch.Tensor, ahead: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Return x = (y - (1 - beta) z) / beta of y and z, of one shape and type."""
    return torch.lerp(trained, ahead, 1 - 1 / beta)


def beta_of(manifest: Mapping[str, Any]) -> float | None:
    """Return the share of x in y in a checkpoint's run; None if its optimizer is another."""
    optimizer = manifest["config"].get("optimizer") or {}
    if optimizer.get("kind") != KIND:
        return None
    return float(optimizer["betas"][0])
