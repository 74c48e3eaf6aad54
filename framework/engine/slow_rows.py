"""A warning of output layers that GPUs compute slowly."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import torch

from framework.config.training import FAST_ROWS, slow_rows
from framework.models.layers import LayeredModel
from framework.system.log import warn


def warn_of_slow_rows(model: torch.nn.Module) -> None:
    """Warn of an output layer of the user's own that GPUs compute slowly in half precision; for
    shipped models the plan has a note.
    """
    if isinstance(model, LayeredModel):
        return
    tokens = 0
    with suppress(AttributeError, NotImplementedError):  # few models have one
        tokens = getattr(cast(Any, model).get_output_embeddings(), "out_features", 0)
    if tokens % FAST_ROWS:
        fix = (
            "fill them up (transformers: resize_token_embeddings), or set training.loss_tile: 2048"
        )
        warn(
            f"output layer of {type(model).__name__}: {slow_rows(tokens)}; {fix} [slow-vocabulary]"
        )
