"""What stands in the groups of the user's own optimizer: it goes into every checkpoint, and must come back out of
it.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from framework.errors import ConfigError, Problem
from framework.setup.objects import type_name


def savable(optimizer: torch.optim.Optimizer, *, key: str, value: str) -> torch.optim.Optimizer:
    """The optimizer, its groups with Python's numbers for numpy's: a checkpoint is read as weights and plain values
    only.

    Args:
        optimizer: as it was just made, before a schedule remembers its rates.
        key: of the config, for the problem.
        value: at that key.

    Raises:
        ConfigError: kind ``optimizer-group-object``: a group holds something that no checkpoint would give back. It
            would be written into each of them, and the first to notice would be the run that is to go on.
    """
    for group in optimizer.param_groups:
        for name, held in group.items():
            if name == "params":
                continue
            group[name] = _plain(held)
            if not _comes_back(group[name]):
                reason = f"its parameter groups hold {name}, {type_name(held)}, which no checkpoint could give back"
                raise ConfigError(
                    Problem(
                        kind="optimizer-group-object",
                        key=key,
                        value=value,
                        reason=reason,
                        fix="keep only numbers, text, tensors and lists of them there",
                    )
                )
    return optimizer


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _comes_back(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str):  # an enumeration is more than the number that it is
        return True
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, map_location="cpu", weights_only=True)
    except Exception:  # whatever pickling or its refusal raises
        return False
    return True
