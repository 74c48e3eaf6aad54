"""Restores state in fp32 beside stepped weights in half precision (`precision.states`).

DeepSpeed 0.19.8's CPU Adam keeps its moments so (ops/adam/cpu_adam.py, `fp32_optimizer_states`),
and `ema.py` the average of the weights. Both are loaded by torch's `Optimizer.load_state_dict`,
which converts the state of a weight to the type of the weight: a resumed run would go on with
rounded numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import deepspeed
import torch


@contextmanager
def keeping_moments(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Have the engine's optimizer load its state as it was saved, for the time of the block."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    saved: list[Mapping[str, Any]] = []

    def note(_: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        saved.append(state_dict)

    def restore(optimizer: torch.optim.Optimizer) -> None:
        _restore(optimizer, saved.pop())

    hooks = [
        base.register_load_state_dict_pre_hook(note),
        base.register_load_state_dict_post_hook(restore),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _restore(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put state of a wider type than its weight back, after torch has rounded it."""
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, weight in zip(numbers, weights, strict=True):
        state = optimizer.state[weight]
        for key, value in saved["state"].get(number, {}).items():
            is_number = torch.is_tensor(value) and value.is_floating_point()
            if is_number and value.dtype.itemsize > state[key].dtype.itemsize:
                state[key] = value.to(weight.device, copy=True)
