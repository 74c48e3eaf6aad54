"""torch's linear layers, which stage 3 of DeepSpeed 0.19.8 replaces for the whole process (runtime/zero/linear.py,
partition_parameters.py `_enable_mem_efficient_linear`), and leaves replaced for every later run.

Theirs is an `autograd.Function` that adds the bias in place. Here it calls torch's own kernel, which takes no second
pass over the output, and has its gradients when torch 2.11 compiles it.
"""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor


def restore_linear_layers(stage: int) -> None:
    """Give an engine of a ZeRO stage its linear layers, before it is built."""
    LinearFunctionForZeroStage3.forward = staticmethod(_forward)
    if stage < 3:
        torch.nn.functional.linear = torch._C._nn.linear


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._C._nn.linear(input, weight, bias)
