"""The arithmetic that fits on paper: bytes of a weight by the usual formulas, and goodput between failures."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Final

# Bytes of a weight in mixed precision with Adam: 2 + 4 for the weight and its fp32 copy, 8 for the moments, and a
# gradient of 2, of 4, or both. Rajbhandari et al. 2020 (ZeRO, section 3) count 16, with a gradient of 2; DeepSpeed's
# own estimator (`estimate_zero2_model_states_mem_needs`) 18, with one of 4; 20 where both are there at once.
PLAIN_BYTES: Final = 20
SHARDED_BYTES: Final = 18
# Failures of one device per second: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.4: 419 unexpected
# interruptions of 16,384 GPUs in 54 days.
FAILURES_PER_SECOND: Final = 419 / (16_384 * 54 * 86_400)


def formula_bytes(num_params: int, ranks: int, *, largest_layer: int) -> Mapping[str, float]:
    """Bytes on each rank by the usual formulas, which know no buckets, no copies and no activations.

    Args:
        num_params: of the model.
        ranks: among which state is spread.
        largest_layer: parameters of the largest layer, which DeepSpeed's estimator of stage 3 gathers.
    """
    half = 2 * num_params
    return {
        "DDP, 20 bytes a weight": float(PLAIN_BYTES * num_params),
        "FSDP, 18 bytes a weight over all ranks": SHARDED_BYTES * num_params / ranks,
        "ZeRO paper, stage 1": 2 * half + 12 * num_params / ranks,
        "ZeRO paper, stage 2": half + 14 * num_params / ranks,
        "ZeRO paper, stage 3": 16 * num_params / ranks,
        "DeepSpeed's estimator, stage 2": half + SHARDED_BYTES * num_params / ranks,
        "DeepSpeed's estimator, stage 3": 4 * largest_layer + SHARDED_BYTES * num_params / ranks,
    }


def best_interval_seconds(save_seconds: float, failure_seconds: float) -> float:
    """Time between checkpoints that loses least, sqrt(2 x save x mean time between failures): Young 1974, "A first
    order approximation to the optimum checkpoint interval".
    """
    return sqrt(2 * save_seconds * failure_seconds)


def goodput(interval_seconds: float, save_seconds: float, failure_seconds: float, restart_seconds: float) -> float:
    """Share of time that trains on: without saves, without what each failure takes back, half an interval in the mean,
    and without restarts. First order, as Daly 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps"; 0 where nothing is left.
    """
    saves = save_seconds / (interval_seconds + save_seconds)
    lost = ((interval_seconds + save_seconds) / 2 + restart_seconds) / failure_seconds
    return max((1 - saves) * (1 - lost), 0.0)
