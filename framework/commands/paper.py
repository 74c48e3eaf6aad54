"""``plan CONFIG --paper``: the usual formulas beside what DeepSpeed allocates, and goodput between
failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod, sqrt
from typing import Any, Final

from framework.errors import ConfigError
from framework.plan.alternatives import size_text, with_settings
from framework.plan.memory import NotEstimatedError, estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.search_space import OFFLOAD, PIPE, STAGE
from framework.plan.work import weights_alone

# Bytes of a weight in mixed precision with Adam: 2 + 4 for the weight and its fp32 copy, 8 for the
# moments, and a gradient of 2, of 4, or both. Rajbhandari et al. 2020 (ZeRO, section 3) count 16,
# with a gradient of 2; DeepSpeed's own estimator (`estimate_zero2_model_states_mem_needs`) 18, with
# one of 4; 20 where both are there at once.
PLAIN_BYTES: Final = 20
SHARDED_BYTES: Final = 18
# Failures of one device per second: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.4:
# 419 unexpected interruptions of 16,384 GPUs in 54 days.
FAILURES_PER_SECOND: Final = 419 / (16_384 * 54 * 86_400)
_SAVE_SECONDS: Final = (10.0, 60.0, 300.0)
_RESTART_SECONDS: Final = 300.0
_HOUR: Final = 3600.0


def formula_bytes(num_params: int, ranks: int, *, largest_layer: int) -> Mapping[str, float]:
    """Return bytes on each rank by the usual formulas, which have no buckets, copies or
    activations.

    Args:
        num_params: of the model.
        ranks: number of ranks that state is spread over.
        largest_layer: parameters of the largest layer, which DeepSpeed's estimator of stage 3
            gathers.
    """
    half = 2 * num_params  # bytes of all weights, or gradients, in half precision
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
    """Return the time between checkpoints that loses least: sqrt(2 x save x mean time between
    failures), Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    return sqrt(2 * save_seconds * failure_seconds)


def goodput(
    interval_seconds: float, save_seconds: float, failure_seconds: float, restart_seconds: float
) -> float:
    """Return the share of time in which training advances, at least 0; saves, restarts, and the
    steps that a failure loses, half an interval on average, do not count.

    First order, as Daly 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps".
    """
    saves = save_seconds / (interval_seconds + save_seconds)
    lost = ((interval_seconds + save_seconds) / 2 + restart_seconds) / failure_seconds
    return max((1 - saves) * (1 - lost), 0.0)


def paper_section(plan: Plan) -> dict[str, Any]:
    """Return the figures as plain values; empty for a model that is not known by name."""
    work = weights_alone(plan.config.model)
    if work is None:
        return {}
    ranks = plan.cluster.world_size
    sizes = [prod(shape) for shape in work.weights.values()]
    stages = {}
    for stage in range(4):
        settings = {STAGE: stage, OFFLOAD: "none", PIPE: 1}
        with suppress(ConfigError, NotEstimatedError):
            memory = estimate(make_plan(with_settings(plan.config, settings), plan.cluster))
            between = memory.total("between")
            most = memory.total(memory.peak)
            stages[str(stage)] = {"is_estimate": True, "between_bytes": between, "most_bytes": most}
    failure_seconds = 1 / (FAILURES_PER_SECOND * ranks)
    saves = []
    for save_seconds in _SAVE_SECONDS:
        interval_seconds = best_interval_seconds(save_seconds, failure_seconds)
        share = goodput(interval_seconds, save_seconds, failure_seconds, _RESTART_SECONDS)
        saves.append(
            {
                "save_seconds": save_seconds,
                "interval_seconds": interval_seconds,
                "goodput": share,
            }
        )
    return {
        "num_params": sum(sizes),
        "formula_bytes": dict(formula_bytes(sum(sizes), ranks, largest_layer=max(sizes))),
        "stages": stages,
        "failure_seconds": failure_seconds,
        "restart_seconds": _RESTART_SECONDS,
        "goodput": saves,
    }


def paper_lines(plan: Plan) -> Iterator[str]:
    """Yield the figures of `paper_section` as lines to print."""
    section = paper_section(plan)
    if not section:
        yield "paper     the model is one of your own: its weights are not known by name"
        return
    total = section["num_params"]
    yield (
        f"paper     {total:,} weights: {size_text(4 * total)} in fp32, {16 * total / 1e9:,.0f} "
        "GB to train at 16 each"
    )
    for name, size in section["formula_bytes"].items():
        yield f"          {name:<40}{size_text(size):>14}"
    for stage, sizes in section["stages"].items():
        between = size_text(sizes["between_bytes"])
        most = size_text(sizes["most_bytes"])
        name = f"DeepSpeed, stage {stage}, as planned here"
        yield f"          {name:<40}{between:>14} between steps, {most} at most, estimated"
    yield (
        f"goodput   {counted_hours(section['failure_seconds'])} between failures of "
        f"{plan.cluster.world_size:,} devices, as Llama 3's failed; {_RESTART_SECONDS:g} s to "
        "start again"
    )
    for save in section["goodput"]:
        every = counted_hours(save["interval_seconds"])
        stops = f"a save stops training for {save['save_seconds']:g} s"
        yield f"          {save['goodput']:.1%} where {stops} and comes every {every}"


def counted_hours(seconds: float) -> str:
    """Return a time in hours with one digit, or in minutes if it is less than an hour."""
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:,.1f} h"
    return f"{seconds / 60:.0f} min"
