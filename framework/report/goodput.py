"""Goodput of a run: every second from the begin of its first process to its last sign of life, by what it was spent on,
over all of its starts. The one computation, for the report, for ``--json`` and for the last line of a run.

Steps are timed by metrics, of which a run that goes on keeps those of the last attempt alone; the rest is in events.
Time that the failure of a start has made worthless, from the checkpoint that the next one goes on from to the last sign
of life, is one class, whatever was done in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from framework.engine.protocol import EVALUATING, SAVING
from framework.report.records import Run, Series

# Of these events `seconds` is time beside the steps, at their end.
_BESIDE: Final = {"evaluate": "evaluation", "save": "saving", "profile": "profiling", "callbacks": "callbacks"}
# What the seconds of a hang are a part of, by its phase; of all others it is the steps.
_HANGS_IN: Final = {EVALUATING: "evaluation", SAVING: "saving"}
# Said by threads that know the last logged step alone, or by who comes later: not how far a start had come.
_NOT_REACHED: Final = ("warning", "hang", "straggler", "restart")


@dataclass(frozen=True)
class Goodput:
    """Time of a run by what it was spent on, in the categories of ml-goodput: seconds of each; and how many starts
    failed before another one.
    """

    parts: Mapping[str, float]
    restarts: int = 0

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Share of the time that trained something which was kept."""
        return self.parts.get("training", 0.0) / self.total if self.total else math.nan


@dataclass
class _Attempt:
    """One start of a run: its events, and its logged points as (step, Unix time)."""

    begin: float
    events: list[dict[str, Any]] = field(default_factory=list)
    points: list[tuple[int, float]] = field(default_factory=list)

    def happened(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in kinds]

    def loop_begin(self) -> float:
        """When the first step began."""
        if first := self.happened("first_step"):
            return max(self.begin, _stamp(first[0]) - _seconds(first[0]))
        return max(self.begin, _stamp(self.events[0])) if self.events else self.begin

    def last(self) -> float:
        """Its last sign of life."""
        stamps = [_stamp(event) for event in self.events if event["kind"] != "restart"]
        return max([self.loop_begin(), *stamps, *(stamp for _, stamp in self.points)])

    def kept_until(self, step: int) -> float:
        """When it had come as far as a step from which another one goes on."""
        stamps = [stamp for at, stamp in self.points if at <= step]
        for event in self.events:
            if event["kind"] not in _NOT_REACHED and event.get("step", 0) <= step:
                stamps.append(_stamp(event))
        return max([self.loop_begin(), *stamps])


def goodput(run: Run) -> Goodput | None:
    """Attribute the time between the first and the last record; None where no step was timed."""
    timed = run.metrics.get("time/step_ms", Series())
    spent = {step: 0.001 * weight * value for step, weight, value in _weighted(timed)}
    training, steps = sum(spent.values()), sum(weight for _, weight, _ in _weighted(timed))
    if not run.clock.finite or not training:
        return None
    attempts = _attempts(run, spent)
    waits = sum(0.001 * weight * value for _, weight, value in _weighted(run.metrics.get("time/data_ms", Series())))
    parts = {"training": training - waits, "waiting for data": waits}

    restarts = 0

    def move(category: str, seconds: float, *, source: str = "") -> None:
        parts[category] = parts.get(category, 0.0) + max(0.0, seconds)
        if source:
            parts[source] = max(0.0, parts.get(source, 0.0) - max(0.0, seconds))

    for attempt, later in zip(attempts, [*attempts[1:], None], strict=True):
        loop_begin, last = attempt.loop_begin(), attempt.last()
        kept = last if later is None else min(last, attempt.kept_until(later.events[0].get("step", 0)))
        move("start-up", loop_begin - attempt.begin)
        for event in attempt.happened(*_BESIDE):
            if _stamp(event) <= kept:
                source = "start-up" if _stamp(event) <= loop_begin else ""
                move(_BESIDE[event["kind"]], _seconds(event), source=source)
        for event in attempt.happened("first_step"):
            if _stamp(event) <= kept:
                move("compiling", _seconds(event) - training / max(1.0, steps), source="training")
        move("steps taken again", last - kept)
        for event in attempt.happened("hang"):
            phase = str(event.get("phase"))
            source = "callbacks" if "callback" in phase else _HANGS_IN.get(phase, "training")
            move("hanging", _seconds(event), source=source if _stamp(event) <= kept else "steps taken again")
        for event in attempt.happened("end"):
            if _stamp(event) <= kept:
                move("ending", kept - _stamp(event))
        down = (later.begin if later is not None else max([last, *map(_stamp, attempt.events)])) - last
        was_asked = any("error" not in event for event in attempt.happened("end"))
        went_back = bool(attempt.happened("roll_back"))
        move("rolling back" if went_back else "stopped" if was_asked else "between restarts", down)
        restarts += later is not None and not (was_asked or went_back)
    first, stamps = attempts[0], [_stamp(event) for event in run.events]
    wall = max([*stamps, *(stamp for _, stamp in run.clock.finite)]) - first.begin
    parts["other"] = max(0.0, wall - sum(parts.values()))
    return Goodput({name: value for name, value in parts.items() if value > 0}, restarts)


def _attempts(run: Run, spent: Mapping[int, float]) -> list[_Attempt]:
    """The starts of a run, in order; one without events where nothing is known of any."""
    found: list[_Attempt] = []
    for event in run.events:
        if "time_seconds" not in event:
            continue
        if event["kind"] in ("start", "resume"):
            found.append(_Attempt(_stamp(event) - _seconds(event)))
        if not found:  # the line of the start was lost
            found.append(_Attempt(_stamp(event)))
        found[-1].events.append(event)
    step, stamp = run.clock.finite[0]
    begin = stamp - spent.get(step, 0.0)
    if not found:
        found.append(_Attempt(begin))
    elif not run.happened("first_step"):  # of an older release: the first logged interval begins where steps do
        found[0].begin = min(found[0].begin, begin)
        found[0].events.append({"kind": "first_step", "time_seconds": begin, "step": 0})
    for step, stamp in run.clock.finite:
        owner = next((attempt for attempt in reversed(found) if attempt.begin <= stamp), found[0])
        owner.points.append((step, stamp))
    return found


def _weighted(series: Series) -> Iterator[tuple[int, float, float]]:
    """Points that are numbers: step, steps since the point before, value."""
    before = 0
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            yield step, float(step - before), value
        before = step


def _stamp(event: Mapping[str, Any]) -> float:
    return float(event.get("time_seconds", -math.inf))


def _seconds(event: Mapping[str, Any]) -> float:
    return max(0.0, float(event.get("seconds", 0.0)))
