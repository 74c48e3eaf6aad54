"""``plan CONFIG --paper``: the usual formulas beside what DeepSpeed allocates, and goodput between failures."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final

from framework.errors import ConfigError
from framework.plan.alternatives import size_text, with_settings
from framework.plan.memory import NotEstimatedError, estimate
from framework.plan.paper import FAILURES_PER_SECOND, best_interval_seconds, formula_bytes, goodput
from framework.plan.plan import Plan, make_plan
from framework.plan.search import OFFLOAD, PIPE, STAGE
from framework.plan.weights import named_weights

_SAVE_SECONDS: Final = (10.0, 60.0, 300.0)
_RESTART_SECONDS: Final = 300.0
_HOUR: Final = 3600.0


def paper_lines(plan: Plan) -> Iterator[str]:
    """Lines for a person on a model known by name; one line of any other."""
    weights = named_weights(plan.config.model)
    if not weights:
        yield "paper     the model is one of your own: its weights are not known by name"
        return
    ranks, sizes = plan.cluster.world_size, [prod(shape) for shape in weights.values()]
    total, largest = sum(sizes), max(sizes)
    yield f"paper     {total:,} weights: {size_text(4 * total)} in fp32, {16 * total / 1e9:,.0f} GB to train at 16 each"
    for name, size in formula_bytes(total, ranks, largest_layer=largest).items():
        yield f"          {name:<40}{size_text(size):>14}"
    for stage in range(4):
        settings = {STAGE: stage, OFFLOAD: "none", PIPE: 1}
        try:
            memory = estimate(make_plan(with_settings(plan.config, settings), plan.cluster))
        except (ConfigError, NotEstimatedError):
            continue
        between, most = size_text(memory.total("between")), size_text(memory.total(memory.peak))
        name = f"DeepSpeed, stage {stage}, as planned here"
        yield f"          {name:<40}{between:>14} between steps, {most} at most, estimated"
    yield from goodput_lines(plan.cluster.world_size)


def goodput_lines(num_devices: int) -> Iterator[str]:
    """Goodput of so many devices with checkpoints at the best interval, for saves of several lengths."""
    between = 1 / (FAILURES_PER_SECOND * num_devices)
    yield (
        f"goodput   {counted_hours(between)} between failures of {num_devices:,} devices, as Llama 3's failed; "
        f"{_RESTART_SECONDS:g} s to start again"
    )
    for save in _SAVE_SECONDS:
        every = best_interval_seconds(save, between)
        share = goodput(every, save, between, _RESTART_SECONDS)
        yield f"          {share:.1%} where a save stops training for {save:g} s and comes every {counted_hours(every)}"


def counted_hours(seconds: float) -> str:
    """Hours with one digit, or minutes."""
    return f"{seconds / _HOUR:,.1f} h" if seconds >= _HOUR else f"{seconds / 60:.0f} min"
