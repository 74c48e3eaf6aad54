"""Lines on a plan's memory, time and strategies, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from framework.commands.folded import width
from framework.commands.strategies import is_same, loser_lines, table_lines
from framework.plan.alternatives import settings_text, size_text
from framework.plan.candidate import Candidate
from framework.plan.hardware import USUAL_CARD, Hardware
from framework.plan.memory import Memory
from framework.plan.otherwise import Otherwise
from framework.plan.plan import Plan
from framework.plan.search import SearchResult
from framework.plan.shortage import IN_WORDS

_MOST_LOSERS: Final = 10
_MOMENTS: Final = IN_WORDS | {"start": "at the start", "between": "between steps"}

_INDENT: Final = "          "  # in place of a label


def alternatives(planned: Candidate, result: SearchResult) -> list[Candidate]:
    """Return the strategies that are clear alternatives to a plan: all, where it does not fit."""
    if planned.lacking(result.target):
        return list(result.ranked)
    return [candidate for candidate in result.ranked if _is_better(candidate, planned)]


def _is_better(candidate: Candidate, planned: Candidate) -> bool:
    """Check that a candidate is more than 2 % faster than the plan, or where speeds are not known
    takes a tenth less memory, and is as fast on a usual card.
    """
    speed = candidate.samples_per_second
    planned_speed = planned.samples_per_second
    if speed is not None and planned_speed is not None:
        return speed > 1.02 * planned_speed
    is_as_fast = 1.02 * candidate.speed_to_rank >= planned.speed_to_rank
    return is_as_fast and candidate.peak_bytes < 0.9 * planned.peak_bytes


def strategy_lines(
    planned: Candidate, result: SearchResult, candidates: Sequence[Candidate]
) -> Iterator[str]:
    """Yield the table of the candidates, and why other strategies lost."""
    target = result.target
    order = _order_text([*candidates, planned], target)
    yield f"{'best':<10}{order}; * as planned; batch: micro x steps x ranks"
    shown = [each for each in result.ranked if each in candidates or is_same(each, planned)]
    columns = width() - len(_INDENT)
    fits = not planned.lacking(target)
    for line in table_lines(shown, planned=planned, fits=fits, columns=columns):
        yield f"{_INDENT}{line}"
    yield from _loser_lines(result, shown)


def alternative_line(planned: Candidate, result: SearchResult) -> Iterator[str]:
    """Yield the best strategy beside the plan."""
    others = alternatives(planned, result)
    if not others:
        return
    best = others[0]
    text = f"{settings_text(best.changes(planned))}: {size_text(best.peak_bytes)} at most"
    if best.samples_per_second is not None:
        text += f", {best.samples_per_second:,.1f} samples per second"
    if len(others) > 1:
        text += f", the best of {len(others)}"
    yield f"{'instead':<10}{text}; --search has the table"


def _loser_lines(result: SearchResult, shown: Sequence[Candidate]) -> Iterator[str]:
    """Yield why strategies that are not shown lost, the first ones."""
    lost = list(loser_lines(result, shown=shown))
    num_left_out = len(lost) - _MOST_LOSERS
    if num_left_out > 0:
        lost = lost[:_MOST_LOSERS]
        lost.append(f"and {num_left_out} more: --json has all")
    label = "others"
    for line in lost:
        yield f"{label:<10}{line}"
        label = ""


def _order_text(shown: Sequence[Candidate], target: Hardware) -> str:
    """Return the order of the strategies in words, with the reason if their speed is not known."""
    if any(candidate.time is not None for candidate in shown):
        return "the fastest first, estimated"
    if target.name:
        why = f"not all rates of {target.name} are listed"
    else:
        why = "no device named (--gpu)"
    return f"in the order of a card on PCIe ({USUAL_CARD}), speed unknown: {why}"


def _on_disk(plan: Plan, num_bytes: int) -> str:
    """Return the room of checkpoints of this size on disk, in words."""
    kept = plan.num_newest_kept()
    saved = f"{size_text(num_bytes)} a checkpoint"
    if kept is None:
        return f"{saved}, and all are kept"
    room = size_text((kept + 1) * num_bytes)
    return f"{saved}, {room} for {kept} kept and one being written"


def memory_lines(planned: Candidate, target: Hardware) -> Iterator[str]:
    """Yield lines on the memory of a rank, of a host, and on disk."""
    memory = planned.memory
    yield f"{'memory':<10}{_memory_text(memory, target)}"
    for label, components in (
        ("at most", memory.moments[memory.peak]),
        ("beside tensors", memory.beside),
        ("host, a rank", memory.host),
        ("drive", memory.drive),
    ):
        sizes = [f"{name} {size_text(size)}" for name, size in _largest_first(components)]
        if sizes:
            yield f"{_INDENT}{label}: {', '.join(sizes)}"
    on_host = target.host_text(memory, planned.plan.cluster.devices_per_host)
    if on_host:
        yield f"{_INDENT}on hosts: {on_host}"
    yield f"{_INDENT}on disk: {_on_disk(planned.plan, memory.saved_bytes)}"


def _memory_text(memory: Memory, target: Hardware) -> str:
    peak = memory.peak
    between = size_text(memory.total("between"))
    at_most = size_text(memory.total(peak))
    text = f"{between} on each rank between steps, {at_most} at most ({_MOMENTS[peak]})"
    usable = target.usable_text(memory)
    if usable:
        text += f" of {usable}"
    text += "; estimated"
    if memory.stage is not None:
        text += f", stage {memory.stage}, the fullest"
    if memory.lacks:
        text += f", without activations: {memory.lacks}"
    return text


def time_lines(planned: Candidate, target: Hardware) -> Iterator[str]:
    """Yield lines on the time of a step, or why it is not known on the device that is named."""
    time = planned.time
    if time is None:
        if planned.no_time:
            yield f"{'time':<10}not estimated: {planned.no_time}"
        return
    line = f"{time.total:.3g} s a step, {time.samples_per_second:,.1f} samples per second"
    tokens = time.tokens_per_second_per_device
    if tokens is not None:
        line += f", {tokens:,.0f} tokens per second and device"
    line += f", model FLOPs utilization {time.mfu:.0%}; estimated for {target.text}"
    yield f"{'time':<10}{line}"
    parts = [f"{name} {seconds:.3g} s" for name, seconds in _largest_first(time.seconds)]
    yield f"{_INDENT}{', '.join(parts)}"


def _largest_first(components: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(components.items(), key=lambda item: -item[1])


def other_lines(others: Sequence[Otherwise]) -> Iterator[str]:
    label = "otherwise"
    for other in others:
        yield f"{label:<10}{other}"
        label = ""
