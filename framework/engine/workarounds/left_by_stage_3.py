"""Removes what stage 3 of DeepSpeed 0.19.8 leaves behind in the process: its own linear function,
and the engine.

It replaces torch's function (runtime/zero/partition_parameters.py `_enable_mem_efficient_linear`,
linear.py) by an `autograd.Function` that adds the bias in place, for every later run as well. Here
this function calls torch's own kernel, which takes no second pass over the output, and has its
gradients when torch 2.11 compiles it.

A list of the modules that are running (runtime/zero/parameter_offload.py) keeps the outermost
module, and the cache of a method (partitioned_param_coordinator.py) every module; by the modules'
hooks both keep the engine with all its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups
from torch import Tensor

_torch_linear: Any = None  # torch's function, before the first of the open runs of stage 3
_num_open = 0


@contextmanager
def leaving_nothing(stage: int) -> Iterator[None]:
    """Have DeepSpeed's linear function call torch's, and clean up at the end of a run at a ZeRO
    stage, however it ends, if no other run of stage 3 is open. Do nothing below stage 3.
    """
    global _torch_linear, _num_open
    if stage < 3:
        yield
        return
    LinearFunctionForZeroStage3.forward = staticmethod(_forward)
    if not _num_open:
        _torch_linear = torch.nn.functional.linear
    _num_open += 1
    try:
        yield
    finally:
        _num_open -= 1
        if not _num_open:
            torch.nn.functional.linear = _torch_linear
            _forget_earlier_run()


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Not F.linear, which calls this function. Detached: autocast would keep a copy of a weight to
    # the end of the forward pass.
    return torch._C._nn.linear(input, weight.detach(), bias)


def _forget_earlier_run() -> None:
    """Empty the list and the cache that keep modules, and forget the ranks that share second copies
    of weights (hpZ), which DeepSpeed would take for later runs as well.
    """
    parameter_offload.FWD_MODULE_STACK.clear()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    forget_releases()


def forget_releases() -> None:
    """Empty the cache of the weights that are released after a module."""
    coordinator = PartitionedParameterCoordinator
    method = coordinator._PartitionedParameterCoordinator__params_to_release
    # DeepSpeed's wrapper holds the method with the cache, as its only free variable.
    (cached,) = method.__closure__
    cached.cell_contents.cache_clear()
