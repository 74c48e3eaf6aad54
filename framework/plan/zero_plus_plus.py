"""What a run passes through for ZeRO++: second copies of weights (hpZ), and weights that are
gathered in 8 bits.

DeepSpeed's quantizer takes shares of whole groups of 8 numbers (0.19.8, runtime/zero/
partition_parameters.py `CUDAQuantizer.quantize`: an AssertionError in the first forward pass).
Where a weight is filled up to a multiple of the ranks, it counts the numbers of a group without the
filling (`AllGatherHandle.wait`, csrc/quantization/pt_binding.cpp `dequantize`): numbers are then
multiplied by the scales of other groups, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.errors import Problem

_NUMBERS_OF_A_GROUP: Final = 8
COPIES: Final = "deepspeed.zero_optimization.zero_hpz_partition_size"
QUANTIZED: Final = "deepspeed.zero_optimization.zero_quantized_weights"


def passed_zero(config: RunConfig) -> Mapping[str, Any]:
    """Return what is passed through to DeepSpeed's section of ZeRO."""
    zero = config.deepspeed.get("zero_optimization")
    if isinstance(zero, dict):
        return zero
    return {}


def size_of_copies(config: RunConfig) -> int:
    """Return the ranks that share second copies of weights (hpZ); 1 without them."""
    size = passed_zero(config).get("zero_hpz_partition_size", 1)
    if config.zero.stage < 3 or not isinstance(size, int):
        return 1
    return max(size, 1)


def uneven_shares(sizes: Iterable[tuple[str, int, int]], *, kept_whole: int) -> tuple[Problem, ...]:
    """Return the problem of the first weight that the quantizer does not take, if any.

    Args:
        sizes: name of each weight, its numbers on the ranks that share it, and how many those are.
        kept_whole: numbers up to which weights are not spread (`param_persistence_threshold`).
    """
    for name, size, ranks in sizes:
        if ranks == 1 or size <= kept_whole or size % (_NUMBERS_OF_A_GROUP * ranks) == 0:
            continue
        reason = (
            f"DeepSpeed quantizes shares of whole groups of {_NUMBERS_OF_A_GROUP} numbers, and "
            f"the {size:,} numbers of {name} cannot be shared so by {ranks} ranks"
        )
        fix = (
            f"remove it, make the weight a multiple of {_NUMBERS_OF_A_GROUP * ranks} numbers, or "
            f"set zero.stage3_param_persistence_threshold: {size}, with which it is not spread"
        )
        return (Problem("quantized-share", reason, fix, QUANTIZED, True),)
    return ()
