"""Half precision at ZeRO stage 0, as DeepSpeed 0.19.8 has it (runtime/fp16/unfused_optimizer.py,
fused_optimizer.py).

It makes an optimizer's state by an empty step: AdamW takes the first gradient for the second, and
weights decay once more. Its norm counts a weight that several stages share once for each of them,
and stays multiplied by the loss scale.
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
    """Have optimizers that are wrapped within the block make their state at their first step."""
    unfused_optimizer.split_params_grads_into_shared_and_expert_params = _split_and_mark
    kinds = FP16_Optimizer, FP16_UnfusedOptimizer
    before = [kind.initialize_optimizer_states for kind in kinds]
    for kind in kinds:
        kind.initialize_optimizer_states = lambda optimizer: None
    try:
        yield
    finally:
        for kind, initialize_states in zip(kinds, before, strict=True):
            kind.initialize_optimizer_states = initialize_states


def _split_and_mark(group: list[Any]) -> Any:
    """Mark the gradients of weights that another stage counts, as DeepSpeed marks the weights."""
    for parameter in group:
        if getattr(parameter, "ds_pipe_replicated", False) and parameter.grad is not None:
            parameter.grad.ds_pipe_replicated = True
    return _split(group)


def norm_of(engine: deepspeed.DeepSpeedEngine) -> float | None:
    """Return the gradient norm of the engine's last step, before clipping and without the loss
    scale; None before the first step.
    """
    norm: float | None = engine.get_global_grad_norm()
    optimizer = engine.optimizer
    # without experts see half_step.py
    is_scaled = isinstance(optimizer, FP16_UnfusedOptimizer) and engine.has_moe_layers
    if norm is not None and is_scaled:
        return norm / float(optimizer.loss_scale)
    return norm
