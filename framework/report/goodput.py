"""Goodput of a run: every second from the begin of its first process to its last sign of life, by
what it was spent on, over all of its starts. The one computation, for the report, for ``--json``
and for the last line of a run.

Steps are timed by metrics; a run that goes on keeps the metrics of the last attempt alone, and the
rest is in events. Time that the failure of a start has made worthless, from the checkpoint that the
next start goes on from to the last sign of life, is one class for all that was done in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any, Final

from framework.report.records import RunRecords
from framework.report.series import Series

# Events with `seconds` of work beside the steps, at their end -> category of that time.
_BESIDE: Final = {
    "evaluate": "evaluation",
    "save": "saving",
    "profile": "profiling",
    "callbacks": "callbacks",
}
_ROUNDING: Final = 0.002  # of the stamps of events
_LOOK_SECONDS: Final = 1.0  # after so long a thread sees that a run goes on
# Events of threads that know the last logged step alone, or of a later process: they do not show
# how far a start had come.
_NOT_REACHED: Final = ("warning", "hang", "slow", "straggler", "restart")


@dataclass(frozen=True)
class Goodput:
    """Time of a run by what it was spent on.

    Attributes:
        parts: category of ml-goodput -> seconds.
        restarts: starts that failed before another one.
    """

    parts: Mapping[str, float]
    restarts: int = 0

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Share of the time in which steps were trained that were kept."""
        if self.total:
            return self.parts.get("training", 0.0) / self.total
        return math.nan


@dataclass
class _Attempt:
    """One start of a run: its events, and its logged points as (step, Unix time)."""

    begin: float
    from_step: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    points: list[tuple[int, float]] = field(default_factory=list)
    shifted: float = 0.0

    def happened(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in kinds]

    def first_step(self) -> dict[str, Any] | None:
        return next(iter(self.happened("first_step")), None)

    def loop_begin(self) -> float:
        """Return the time at which the first step began."""
        first = self.first_step()
        if first is not None:
            return max(self.begin, _stamp(first) - _seconds(first))
        if self.events:
            return max(self.begin, _stamp(self.events[0]))
        return self.begin

    def last(self) -> float:
        """Return the Unix time of the last event or point of this start."""
        last = self.loop_begin()
        for event in self.events:
            if event["kind"] != "restart":
                last = max(last, _stamp(event))
        for _, stamp in self.points:
            last = max(last, stamp)
        return last

    def kept_until(self, step: int) -> float:
        """Return the Unix time at which this start had reached a step; later work was lost if
        another start goes on from that step.
        """
        last = self.loop_begin()
        for point_step, stamp in self.points:
            if point_step <= step:
                last = max(last, stamp)
        for event in self.events:
            # an event may have lost its step: it is not known to be reached
            if event["kind"] not in _NOT_REACHED and event.get("step", math.inf) <= step:
                last = max(last, _stamp(event))
        return last

    def shift(self, seconds: float) -> None:
        """Move the begin, the points and the events of this start by some seconds."""
        self.begin += seconds
        self.shifted += seconds
        self.points = [(step, stamp + seconds) for step, stamp in self.points]
        self.events = [event | {"time_seconds": _stamp(event) + seconds} for event in self.events]

    def has_evaluated(self, step: int, stamp: float) -> bool:
        """Check whether this start evaluated at a step, around a Unix time."""
        for event in self.happened("evaluate"):
            is_near = abs(_stamp(event) - stamp) <= _seconds(event) + _LOOK_SECONDS
            if is_near and event.get("step") == step:
                return True
        return False

    def hang(self) -> dict[str, Any] | None:
        """Return the event of the hang that ended this start, or None; a hang after which the start
        went on is part of a slow step.
        """
        hangs = self.happened("hang")
        if not hangs:
            return None
        noted = _stamp(hangs[-1]) - _LOOK_SECONDS
        later = self._kinds_since(noted)
        if later[:1] == ["stop"]:  # requested while the start hung
            return hangs[-1]
        if later or any(stamp >= noted for _, stamp in self.points):
            return None
        return hangs[-1]

    def _kinds_since(self, stamp: float) -> list[str]:
        """Return the kinds of the events from a Unix time on, without those that do not show how
        far ranks came.
        """
        kinds = []
        for event in self.events:
            if event["kind"] not in _NOT_REACHED and _stamp(event) >= stamp:
                kinds.append(event["kind"])
        return kinds


def goodput(run: RunRecords) -> Goodput | None:
    """Attribute all time between the first and the last record; None if no step was taken."""
    attempts = _attempts(run)
    times = _Times(run, attempts)
    if not attempts or not (times.is_timed or run.happened("first_step")):
        return None
    parts: dict[str, float] = {}
    restarts = 0
    for attempt, later in zip_longest(attempts, attempts[1:]):
        last = attempt.last()
        kept = last
        end = max([last, *map(_stamp, attempt.events)])
        category = _category_after(attempt)
        if later is not None:
            kept = min(last, attempt.kept_until(later.events[0].get("step", 0)))
            end = later.begin
            restarts += category == "between restarts"
        loop_begin = attempt.loop_begin()
        _add(parts, _startup_seconds(attempt, loop_begin))
        _add(parts, _loop_seconds(attempt, loop_begin, kept, times))
        _add(parts, _lost_seconds(attempt, kept, last))
        _add(parts, {category: end - last})
    return Goodput({name: value for name, value in parts.items() if value > 0}, restarts)


def _add(parts: dict[str, float], more: Mapping[str, float]) -> None:
    """Add seconds by category to `parts`, in place."""
    for category, seconds in more.items():
        parts[category] = parts.get(category, 0.0) + seconds


def _lost_seconds(attempt: _Attempt, kept: float, last: float) -> dict[str, float]:
    """Return the seconds from the last step that was kept to the last sign of life, by category:
    hanging, and steps that another start took again.
    """
    hang = attempt.hang()
    hanging = 0.0
    if hang is not None and _stamp(hang) > kept:
        hanging = min(_seconds(hang), last - kept)
    return {"hanging": hanging, "steps taken again": last - kept - hanging}


def _category_after(attempt: _Attempt) -> str:
    """Return the category of the time between a start's last sign of life and the next start."""
    if attempt.happened("roll_back"):
        return "rolling back"
    if any("error" not in event for event in attempt.happened("end")):
        return "stopped"
    return "between restarts"


class _Times:
    """Time of the steps by the metrics.

    Attributes:
        usual: seconds of a usual step.
        is_timed: whether metrics have the time of steps.
        seconds, waits: id of a start -> (Unix time, seconds) of its points.
    """

    def __init__(self, run: RunRecords, attempts: Sequence[_Attempt]) -> None:
        timed = run.metrics.get("time/step_ms", Series())
        waits = run.metrics.get("time/data_ms", Series())
        self._stamps = run.clock.finite
        self._steps = [step for step, _ in self._stamps]
        self.seconds = self._by_attempt(timed, attempts)
        self.waits = self._by_attempt(waits, attempts)
        # If there are several points the first one pays for compiling; the median leaves out slow
        # steps.
        step_seconds = [0.001 * value for _, _, value in _weighted(timed)]
        self.is_timed = sum(step_seconds) > 0
        self.usual = median(step_seconds[1:] or step_seconds or [0.0])

    def _by_attempt(
        self, series: Series, attempts: Sequence[_Attempt]
    ) -> dict[int, list[tuple[float, float]]]:
        """Return id of a start -> (Unix time, seconds) of its points. A point of a thinned series
        may get the time of the next point that the clock has.
        """
        points: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for step, weight, value in _weighted(series):
            if not self._stamps or not attempts:
                break
            at = min(bisect_left(self._steps, step), len(self._steps) - 1)
            owner = _attempt_of_point(attempts, step, self._stamps[at][1])
            stamp = self._stamps[at][1] + owner.shifted
            points[id(owner)].append((stamp, 0.001 * weight * value))
        return points


def _startup_seconds(attempt: _Attempt, loop_begin: float) -> dict[str, float]:
    """Return the seconds of a start before its first step, by category."""
    left = loop_begin - attempt.begin
    parts: dict[str, float] = {}
    for event in attempt.happened(*_BESIDE):
        if _stamp(event) <= loop_begin + _ROUNDING:
            seconds = min(_seconds(event), left)
            category = _BESIDE[event["kind"]]
            parts[category] = parts.get(category, 0.0) + seconds
            left -= seconds
    return parts | {"start-up": left}


def _loop_seconds(
    attempt: _Attempt, loop_begin: float, kept: float, times: _Times
) -> dict[str, float]:
    """Return the seconds from the first step to the last one that was kept, by category: steps,
    work beside them, and the rest. `loop_begin` and `kept` are Unix times.
    """
    beside: dict[str, float] = {}
    for event in attempt.happened(*_BESIDE):
        if loop_begin + _ROUNDING < _stamp(event) <= kept:
            category = _BESIDE[event["kind"]]
            beside[category] = beside.get(category, 0.0) + _seconds(event)
    for event in attempt.happened("end"):
        if _stamp(event) <= kept:
            beside["ending"] = kept - _stamp(event)
    hang = attempt.hang()
    if hang is not None and _stamp(hang) <= kept:
        beside["hanging"] = _seconds(hang)

    steps = _step_seconds(attempt, loop_begin, kept, times)
    # Clocks are read apart, and a mean is no sum: if the parts exceed the time, steps are cut.
    total = kept - loop_begin
    steps = _scaled(steps, most=max(0.0, total - sum(beside.values())))
    parts = steps | _scaled(beside, most=total)
    return parts | {"other": max(0.0, total - sum(parts.values()))}


def _step_seconds(
    attempt: _Attempt, loop_begin: float, kept: float, times: _Times
) -> dict[str, float]:
    """Return the seconds of the steps that were kept, by category. Compiling is what the first step
    took beyond its wait for data and a usual step.
    """
    timed = _seconds_until(kept, times.seconds[id(attempt)])
    waited = _seconds_until(kept, times.waits[id(attempt)])
    waits = sum(waited)
    training = sum(timed) - waits
    training += _not_timed(attempt, loop_begin, kept, times)
    compiling = 0.0
    first = attempt.first_step()
    if first is not None and timed and _stamp(first) <= kept + _ROUNDING:
        wait = min(_seconds(first), waited[0] if waited else 0.0)
        known = first.get("data_seconds")
        if isinstance(known, int | float) and known >= 0:
            wait = min(_seconds(first), waits, known)
        compiling = min(training, max(0.0, _seconds(first) - wait - times.usual))
    return {
        "training": max(0.0, training - compiling),
        "waiting for data": waits,
        "compiling": compiling,
    }


def _seconds_until(end: float, points: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of the points (Unix time, seconds) up to the time `end`."""
    return [seconds for stamp, seconds in points if stamp <= end]


def _not_timed(attempt: _Attempt, loop_begin: float, kept: float, times: _Times) -> float:
    """Return the seconds of steps after the last kept point, by events: a full disk may have cost
    the points. At most twice the usual time of these steps counts.
    """
    step: float = attempt.from_step
    since = loop_begin
    for point_step, stamp in attempt.points:
        if stamp <= kept:
            step = point_step
            since = stamp
    last_step = step
    end = since
    for event in _progress(attempt, since, kept):
        event_step = float(event.get("step", 0))
        if event_step > step:
            last_step = max(last_step, event_step)
            end = max(end, _stamp(event))
    if last_step == step:
        return 0.0
    seconds = max(0.0, end - since - _seconds_beside(attempt, since, end))
    if not times.is_timed:
        return seconds
    return min(seconds, 2 * times.usual * (last_step - step))


def _seconds_beside(attempt: _Attempt, since: float, until: float) -> float:
    """Return the seconds of what a start did beside its steps."""
    beside = 0.0
    for event in _progress(attempt, since, until):
        if event["kind"] in _BESIDE:
            beside += _seconds(event)
    return beside


def _progress(attempt: _Attempt, since: float, until: float) -> Iterator[dict[str, Any]]:
    """Yield the events after `since` and up to `until`, both Unix times, that show how far a start
    had come.
    """
    for event in attempt.events:
        is_progress = event["kind"] != "closed" and event["kind"] not in _NOT_REACHED
        if is_progress and since < _stamp(event) <= until:
            yield event


def _scaled(parts: Mapping[str, float], *, most: float) -> dict[str, float]:
    """Return the parts, all reduced by one factor if their sum exceeds `most`."""
    total = sum(parts.values())
    if total <= most:
        return dict(parts)
    return {name: value * most / total for name, value in parts.items()}


def _attempts_of_events(run: RunRecords) -> list[_Attempt]:
    """Return the starts of a run, each with its events and no points yet."""
    attempts: list[_Attempt] = []
    for event in run.events:
        if "time_seconds" not in event:
            continue
        if event["kind"] in ("start", "resume"):
            begin = _stamp(event) - _seconds(event)
            attempts.append(_Attempt(begin, from_step=float(event.get("step", 0))))
        if not attempts:  # the line of the start was lost
            attempts.append(_Attempt(_stamp(event)))
        attempts[-1].events.append(event)
    return attempts


def _attempts(run: RunRecords) -> list[_Attempt]:
    """Return the starts of a run, in order, with their points and with clocks moved so that each
    begins after the one before; without events one start has all points.
    """
    attempts = _attempts_of_events(run)
    points = run.clock.finite
    if points:
        _add_begin(run, attempts, points[0])
        for step, stamp in points:
            _attempt_of_point(attempts, step, stamp).points.append((step, stamp))
    for attempt, later in pairwise(attempts):
        later.shift(_clock_shift(attempt, later))
    return attempts


def _add_begin(run: RunRecords, attempts: list[_Attempt], point: tuple[int, float]) -> None:
    """Set the begin of the first start from the first logged point (step, Unix time) if no event
    records the first step, as in runs of older releases. May add a start, or an event to the first.
    """
    step, stamp = point
    spent = 0.0
    for at, weight, milliseconds in _weighted(run.metrics.get("time/step_ms", Series())):
        # The first point of a thinned series may be behind the clock's first point.
        num_steps = min(weight, step - (at - weight))
        if num_steps <= 0:
            break
        spent += 0.001 * num_steps * milliseconds
    begin = stamp - spent
    if not attempts:
        attempts.append(_Attempt(begin))
    elif not run.happened("first_step"):
        attempts[0].begin = min(attempts[0].begin, begin)
        attempts[0].events.append({"kind": "first_step", "time_seconds": begin, "step": 0})


def _attempt_of_point(attempts: Sequence[_Attempt], step: int, stamp: float) -> _Attempt:
    """Find the start that has logged a point.

    It is the last start from an earlier step, because each start drops the points after the step
    that it begins from; or a start from that step that has evaluated there at that time.
    """
    for attempt in reversed(attempts):
        if attempt.from_step < step:
            return attempt
        if attempt.from_step == step and attempt.has_evaluated(step, stamp):
            return attempt
    return attempts[0]


def _clock_shift(attempt: _Attempt, later: _Attempt) -> float:
    """Return the seconds by which `later` must be moved to begin after `attempt`, because clocks of
    machines differ.

    If both starts have the time since the same boot, which no program sets, that time decides.
    Otherwise `later` is moved after the last sign of life of `attempt`.
    """
    start = attempt.events[0]
    resume = later.events[0]
    boot = start.get("boot")
    if boot and boot == resume.get("boot"):
        since = _boot_seconds(resume) - _seconds(resume) - _boot_seconds(start) + _seconds(start)
        begin = attempt.begin + since
        if math.isfinite(begin):
            return max(begin, attempt.last()) - later.begin
    return max(0.0, attempt.last() - later.begin)


def _boot_seconds(event: Mapping[str, Any]) -> float:
    value = event.get("boot_seconds")
    if isinstance(value, int | float):
        return float(value)
    return math.nan


def _weighted(series: Series) -> Iterator[tuple[int, float, float]]:
    """Yield the points that are numbers: step, steps since the point before, value."""
    before = 0
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            yield step, float(step - before), value
        before = step


def _stamp(event: Mapping[str, Any]) -> float:
    return float(event.get("time_seconds", -math.inf))


def _seconds(event: Mapping[str, Any]) -> float:
    return max(0.0, float(event.get("seconds", 0.0)))
