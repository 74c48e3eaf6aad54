"""What stage 3 of DeepSpeed 0.19.8 leaves behind in the process: linear layers of its own, and the model.

It replaces torch's function (runtime/zero/partition_parameters.py `_enable_mem_efficient_linear`, linear.py) by an
`autograd.Function` that adds the bias in place, for every later run as well. Here that calls torch's own kernel, which
takes no second pass over the output, and has its gradients when torch 2.11 compiles it.

A list of the modules that are being run (runtime/zero/parameter_offload.py) keeps the outermost one, and the cache of a
method (partitioned_param_coordinator.py) every one, and by their hooks the engine with all its memory.
"""

from __future__ import annotations

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor


def restore_linear_layers(stage: int) -> None:
    """Give an engine of a ZeRO stage its linear layers, before it is built."""
    LinearFunctionForZeroStage3.forward = staticmethod(_forward)
    if stage < 3:
        torch.nn.functional.linear = torch._C._nn.linear


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._C._nn.linear(input, weight, bias)


def forget_modules() -> None:
    """Let go of the model, when its engine is closed."""
    parameter_offload.FWD_MODULE_STACK.clear()
    (cached,) = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release.__closure__
    cached.cell_contents.cache_clear()
