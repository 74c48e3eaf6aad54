"""The memory of a plan and of its nearest alternatives, for the command `plan`: what fits, and what would."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.config.load import config_from_values
from framework.errors import ConfigError, Problem
from framework.plan.memory import Memory, NotEstimatedError, estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.work import ModelWork

# What is tried beside the plan: dotted keys of a run config and their values.
_ALTERNATIVES: Final[Sequence[Mapping[str, Any]]] = (
    *({"zero.stage": stage} for stage in range(4)),
    {"zero.offload_optimizer.device": "cpu"},
    {"zero.stage": 3, "zero.offload_optimizer.device": "cpu"},
    {"zero.reduce_bucket_size": 5_000_000},
    {"precision.dtype": "bf16"},
)
_MOMENTS: Final = {
    "start": "after the start",
    "between": "between steps",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
}
_MIB: Final = 2**20


@dataclass(frozen=True)
class Alternative:
    """Memory with some settings changed; none: as planned."""

    settings: Mapping[str, Any]
    memory: Memory

    @property
    def peak_bytes(self) -> int:
        """The most on a device at any moment."""
        return self.memory.total(self.memory.peak)

    def __str__(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.settings.items())


@dataclass(frozen=True)
class MemoryTable:
    """Lines for a person, and what is wrong with the plan on a device of known memory."""

    lines: tuple[str, ...]
    findings: tuple[Problem, ...] = ()


def memory_table(
    plan: Plan, *, work: ModelWork | None = None, why: str = "", gpu: str = "", memory_gib: int | None = None
) -> MemoryTable:
    """Compare the plan with its alternatives.

    Args:
        work: of a model of the user's own; `why` it is not known.
        gpu: the name of the device, whose memory is `memory_gib`; None: only sizes are printed.
    """
    try:
        planned = Alternative({}, estimate(plan, work=work))
    except NotEstimatedError as error:
        return MemoryTable((f"memory    not estimated: {error}{why and f' ({why})'}",))
    others = sorted(_alternatives(plan, planned, work), key=lambda other: other.peak_bytes)
    limit = None if memory_gib is None else memory_gib * 1024 * _MIB
    lines = [f"memory    {_summary(planned.memory)}", *_components(planned.memory)]
    for other in others:
        change = other.peak_bytes - planned.peak_bytes
        words = f"{size_text(abs(change))} {'more' if change > 0 else 'less'}"
        fits = "" if limit is None else f", {'fits' if other.peak_bytes <= limit else 'does not fit'}"
        lines.append(f"          {other}: {size_text(other.peak_bytes)} at most, {words}{_host(other.memory)}{fits}")
    if limit is None or planned.peak_bytes <= limit:
        return MemoryTable(tuple(lines))
    fitting = [other for other in others if other.peak_bytes <= limit]
    # The largest that fits is the one that changes least, and every further cut costs traffic.
    fix = f"set {fitting[-1]}" if fitting else _devices_that_fit(plan, limit, work)
    reason = f"each rank takes {size_text(planned.peak_bytes)}, and {gpu} has {memory_gib} GiB"
    stage = plan.config.zero.stage
    return MemoryTable(
        tuple(lines), (Problem("memory-too-small", reason, fix, "zero.stage", stage, severity="warning"),)
    )


def _devices_that_fit(plan: Plan, limit: int, work: ModelWork | None) -> str:
    """Find the smallest power of two of devices that the plan fits on at stage 3, with the same micro-batches."""
    config = config_from_values(_changed(plan, {"zero.stage": 3}))
    for ranks in (2**power for power in range(1, 15)):
        more = replace(plan, config=config, layout=replace(plan.layout, world_size=ranks, data_parallel_size=ranks))
        memory = estimate(more, work=work)
        if memory.total(memory.peak) <= limit:
            return f"use {ranks} devices with zero.stage: 3"
    return "use a smaller model: its largest weights alone do not fit"


def size_text(size: int) -> str:
    """Bytes for a person, in MiB or GiB."""
    return f"{size / _MIB:,.1f} MiB" if size < 1024 * _MIB else f"{size / 1024 / _MIB:,.2f} GiB"


def _summary(memory: Memory) -> str:
    peak = memory.peak
    stage = "" if memory.stage is None else f", stage {memory.stage}, the fullest"
    lacks = f", without activations: {memory.lacks}" if memory.lacks else ""
    return (
        f"{size_text(memory.total('between'))} on each rank between steps, {size_text(memory.total(peak))} at most "
        f"({_MOMENTS[peak]}){_host(memory)}; estimated{stage}{lacks}"
    )


def _components(memory: Memory) -> Iterator[str]:
    sizes = sorted(memory.moments[memory.peak].items(), key=lambda item: -item[1])
    yield f"          at most: {', '.join(f'{name} {size_text(size)}' for name, size in sizes)}"


def _host(memory: Memory) -> str:
    total = sum(memory.host.values())
    return f", {size_text(total)} on the host" if total else ""


def _alternatives(plan: Plan, planned: Alternative, work: ModelWork | None) -> Iterator[Alternative]:
    """Those that the rules allow and that change the peak by one part in a hundred or more."""
    seen = [plan.config.to_dict()]
    for settings in _ALTERNATIVES:
        if work is not None and "precision.dtype" in settings:  # what was found is of this one
            continue
        values = _changed(plan, settings)
        try:
            config = config_from_values(values)
            memory = estimate(make_plan(config, plan.cluster), work=work)
        except (ConfigError, NotEstimatedError):
            continue
        other = Alternative(settings, memory)
        is_new = config.to_dict() not in seen
        seen.append(config.to_dict())
        if is_new and abs(other.peak_bytes - planned.peak_bytes) >= planned.peak_bytes / 100:
            yield other


def _changed(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's config with dotted keys set; where a kind changes, what belonged to the other one goes."""
    values = copy.deepcopy(plan.config.to_dict())
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = values
        for name in sections:
            place = place.setdefault(name, {})
        if last in {"device", "dtype"} and place.get(last) != value:
            place.clear()
        place[last] = value
    return values
