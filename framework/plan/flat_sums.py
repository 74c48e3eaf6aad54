"""Which runs add gradients of ZeRO 1 and 2 up from flat tensors (`engine/flat_sums.py`), when."""

from __future__ import annotations

from typing import Final

from framework.config.precision import Autocast
from framework.config.run_config import RunConfig
from framework.plan.compiling import uses_deepcompile
from framework.plan.layout import Layout


def coalesces(config: RunConfig, layout: Layout) -> bool:
    """Check whether gradients of stage 2 are summed over the ranks once in a step."""
    zero = config.zero
    is_asked = zero.stage == 2 and zero.coalesce and layout.accumulation_steps > 1
    # DeepCompile sums within its graph, after each micro-batch
    return is_asked and not uses_deepcompile(config)


def waits(config: RunConfig, layout: Layout) -> bool:
    """Check whether whole gradients wait for the last micro-batch of a step at stages 1 and 2."""
    return config.zero.stage == 1 or coalesces(config, layout)


# Most elements of a message of `engine/gradient_sums.py`: 25 MiB of float32, as torch's DDP.
DDP_BUCKET: Final = 25 * 2**20 // 4


def most_in_message(bucket: int) -> int:
    """Return how many numbers are sent at once: they and their sum fit in the bucket that they
    replace.
    """
    return bucket // 2


def may_sum_flat(config: RunConfig, layout: Layout) -> bool:
    """Check whether gradients may be summed so; at stage 2 they are only if they wait, or fit."""
    zero = config.zero
    is_elsewhere = layout.pipe_size > 1 or layout.expert_size > 1
    if zero.stage not in (1, 2) or is_elsewhere or zero.offload_optimizer.device != "none":
        return False
    if isinstance(config.precision, Autocast) or config.deepspeed.get("wall_clock_breakdown"):
        return False
    if zero.overlap_comm or uses_deepcompile(config):
        return False
    return zero.reduce_scatter and zero.contiguous_gradients
