"""What stage 3 of DeepSpeed 0.19.8 leaves behind in the process: linear layers of its own, and the
engine.

It replaces torch's function (runtime/zero/partition_parameters.py `_enable_mem_efficient_linear`,
linear.py) by an `autograd.Function` that adds the bias in place, for every later run as well. Here
that calls torch's own kernel, which takes no second pass over the output, and has its gradients
when torch 2.11 compiles it.

A list of the modules that are being run (runtime/zero/parameter_offload.py) keeps the outermost
one, and the cache of a method (partitioned_param_coordinator.py) every one, and by their hooks the
engine with all its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor

_torchs: Any = None  # before the first of the runs of stage 3 that are open
_num_open = 0


@contextmanager
def leaving_nothing(stage: int) -> Iterator[None]:
    """Around a run at a ZeRO stage, however it ends: when no other run of stage 3 is open, all is
    as it was before.
    """
    global _torchs, _num_open
    if stage < 3:
        yield
        return
    LinearFunctionForZeroStage3.forward = staticmethod(_forward)
    if not _num_open:
        _torchs = torch.nn.functional.linear
    _num_open += 1
    try:
        yield
    finally:
        _num_open -= 1
        if not _num_open:
            torch.nn.functional.linear = _torchs
            _forget_modules()


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Not F.linear, which is this. Detached: autocast would keep a copy of a weight to the end of
    # the forward pass.
    return torch._C._nn.linear(input, weight.detach(), bias)


def _forget_modules() -> None:
    parameter_offload.FWD_MODULE_STACK.clear()
    (cached,) = (
        PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release.__closure__
    )
    cached.cell_contents.cache_clear()
