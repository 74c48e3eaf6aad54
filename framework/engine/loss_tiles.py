"""The loss tile by tile (`training.loss_tile`): which output layers compute it, for which tasks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import deepspeed
import torch

from framework.errors import ConfigError
from framework.models.layers import LayeredModel
from framework.models.tiled_loss import output_head, wanting_loss
from framework.plan.plan import Plan
from framework.tasks.causal_lm import CausalLM
from framework.tasks.masked_lm import MaskedLM

_LOSSES: Final = {CausalLM.loss, CausalLM.measure, MaskedLM.loss, MaskedLM.measure}


def loss_tiles(
    model: torch.nn.Module, plan: Plan, task: Any
) -> Callable[[Any], AbstractContextManager[None]]:
    """Return a function from a batch's targets to a context in which the output layer of a model
    computes the loss tile by tile; a context without effect if it cannot.

    Raises:
        ConfigError: kind ``loss-not-tiled``: the config sets a tile, and it cannot.
    """
    tile = plan.config.training.loss_tile
    is_shipped = type(task) in (CausalLM, MaskedLM) and isinstance(model, LayeredModel)
    if tile == "auto" and not is_shipped:
        return lambda targets: nullcontext()
    head, reason = _head_and_reason(model, plan, task)
    if head is None:
        if tile == "auto":
            return lambda targets: nullcontext()
        fix = "set training.loss_tile: 0"
        raise ConfigError.of("loss-not-tiled", reason, fix, "training.loss_tile", tile)
    if plan.config.zero.stage == 3:
        for bias in getattr(head, "head_bias", ()):  # a parameter of another module
            deepspeed.zero.register_external_parameter(head, bias)
    if isinstance(task, MaskedLM):
        return lambda targets: wanting_loss(targets[0], tile, task.vocabulary)
    return lambda targets: wanting_loss(targets, tile, task.vocabulary)


def _head_and_reason(
    model: torch.nn.Module, plan: Plan, task: Any
) -> tuple[torch.nn.Module | None, str]:
    """Return the output layer that can compute the loss, or None, and the reason for None."""
    kind = type(task)
    if not {getattr(kind, "loss", None), getattr(kind, "measure", None)} <= _LOSSES:
        return None, f"{kind.__name__} computes a loss of its own from logits"
    reason = (
        f"the output layer of {type(model).__name__} is not known, or not an nn.Linear of its own"
    )
    is_joined = plan.layout.tensor_size > 1 and task.vocabulary is None
    if is_joined:
        joined = f"ranks of the tensor group join the logits of {type(model).__name__}"
        return None, f"{joined}, as no entry of its plan divides the output layer by `vocabulary`"
    return output_head(model), reason
