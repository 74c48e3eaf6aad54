"""Half precision at ZeRO stage 0, where DeepSpeed 0.19.8 wraps an optimizer (runtime/fp16/unfused_optimizer.py and
fused_optimizer.py).

To make its state, it steps it with gradients of zero (`initialize_optimizer_states`): AdamW then takes the first
gradient for the second, and weights decay once more, at the rate before any schedule. Its norm is taken of gradients,
which do not say that another stage of a pipeline counts them as well, and stays multiplied by the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import deepspeed
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

_split: Final = unfused_optimizer.split_params_grads_into_shared_and_expert_params


@contextmanager
def taking_no_empty_step() -> Iterator[None]:
    """Leave the state of optimizers that are wrapped meanwhile to their first step, and let norms count tied weights
    once.
    """
    unfused_optimizer.split_params_grads_into_shared_and_expert_params = _split_and_marked
    kinds = FP16_Optimizer, FP16_UnfusedOptimizer
    stepped = [kind.initialize_optimizer_states for kind in kinds]
    for kind in kinds:
        kind.initialize_optimizer_states = lambda optimizer: None
    try:
        yield
    finally:
        for kind, step in zip(kinds, stepped, strict=True):
            kind.initialize_optimizer_states = step


def _split_and_marked(group: list[Any]) -> Any:
    for parameter in group:
        if getattr(parameter, "ds_pipe_replicated", False) and parameter.grad is not None:
            parameter.grad.ds_pipe_replicated = True
    return _split(group)


def norm_of(engine: deepspeed.DeepSpeedEngine) -> float | None:
    """The gradient norm of the engine's last step, before clipping."""
    norm: float | None = engine.get_global_grad_norm()
    if norm is None or not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return norm
    return norm / float(engine.optimizer.loss_scale)
