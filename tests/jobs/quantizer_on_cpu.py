"""DeepSpeed's quantizer on processors: its kernel is CUDA's alone, so its two functions are written
down in torch here, as the kernel has them (csrc/includes/quantization_utils.h: symmetric, groups of
consecutive numbers with one scale each). Everything above them is DeepSpeed's own.
"""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

from deepspeed_lint.rules import silent
from framework.plan.rules import passthrough
from framework.plan.rules.base import LISTED

_NUM_CODES = 256


class TorchKernel:
    """Stands in for the compiled module."""

    Symmetric = 0

    @staticmethod
    def quantize(
        numbers: torch.Tensor, groups: int, num_bits: int, kind: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of a byte, and the step between two codes of each group."""
        rows = numbers.reshape(groups, -1).float()
        steps = 2 * rows.abs().amax(1, keepdim=True) / _NUM_CODES
        steps[steps == 0] = 1.0
        codes = (rows / steps).round_().clamp_(-_NUM_CODES // 2, _NUM_CODES // 2 - 1)
        return codes.to(torch.int8).view(numbers.shape), steps.flatten()

    @staticmethod
    def dequantize(
        codes: torch.Tensor, steps: torch.Tensor, groups: int, num_bits: int, kind: int
    ) -> torch.Tensor:
        """Return the numbers that codes stand for, in half precision as the kernel does."""
        rows = codes.reshape(groups, -1).float() * steps.view(-1, 1)
        return rows.half().view(codes.shape)


def allow_quantized() -> None:
    """Let DeepSpeed quantize weights, and the plan believe that it can."""
    CUDAQuantizer.quantizer_cuda_module = TorchKernel
    rules = LISTED[passthrough.__name__]
    rules[:] = [rule for rule in rules if rule.__name__ != "quantized_on_cpu"]
    silent._cuda_keys_of_stage_3 = lambda facts: {}
