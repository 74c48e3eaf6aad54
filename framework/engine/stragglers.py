"""Names a rank that keeps the others waiting, from the parts of a step that all ranks exchange at
logged points anyway.

Before the first collective of a step a rank works alone: it reads data, and computes the forward
pass if no weights, positions or experts are divided. In the backward pass, in which gradients are
summed, a rank's work cannot be separated from its wait for the others; so the backward pass counts
only for a rank that is not early. Stages of a pipeline differ rightly, and are not compared.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from framework.engine.distributed import gather
from framework.plan.plan import Plan
from framework.system.log import warn

Parts = Mapping[str, Sequence[float]]
"""Milliseconds in a step that each rank was in a part of it; -1 where it has no such part."""

_OWN: Final = ("data", "copy")
_ALL: Final = (*_OWN, "forward", "backward", "communication", "optimizer")
# Less is what machines vary by: in a step, and in all since the rank became slow.
_SHARE_OF_STEP: Final = 0.1
_SHARE_OF_BACKWARD: Final = 0.1  # of what the rank is late by, to be named beside the forward pass
_FEWEST_POINTS: Final = 3
_FEWEST_SECONDS: Final = 2.0
# A change of the excess by this factor is reported again. The rank's factor may be of nearly zero.
_CHANGE: Final = 1.5
_GONE_POINTS: Final = 10  # logged points without a straggler, after which reports are forgotten


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting.

    Attributes:
        rank: the rank.
        part: the part of a step for which it takes longer.
        own_ms: its milliseconds in this part of a step.
        others_ms: the median of the others'.
        data_ms: its milliseconds of reading.
        step_ms: mean length of a step.
    """

    rank: int
    part: str
    own_ms: float
    others_ms: float
    data_ms: float
    step_ms: float

    @property
    def excess_ms(self) -> float:
        """Return the time by which each step would be shorter."""
        return self.own_ms - self.others_ms

    @property
    def factor(self) -> float:
        """Return how many times longer the rank computes; or how many times longer the step is by
        the wait for its data. It is 100 at most.
        """
        if self.part == "data":
            return self.step_ms / max(self.step_ms - self.excess_ms, 0.01 * self.step_ms)
        return self.own_ms / max(self.others_ms, 0.01 * self.own_ms)

    def sentence(self, host: str) -> str:
        """Describe the straggler for a warning."""
        figures = f"{self.own_ms:.3g} ms against {self.others_ms:.3g} ms"
        if self.part == "data":
            return (
                f"rank {self.rank} (host {host}) keeps the others waiting, as it waits for its "
                f"data: data {figures}, in a step of {self.step_ms:.3g} ms, {self.factor:.1f} x "
                "as long by it [straggler]"
            )
        return (
            f"rank {self.rank} (host {host}) computes {self.factor:.1f} x slower than the others: "
            f"data {self.data_ms:.3g} ms, {self.part} {figures} [straggler]"
        )


def find(parts: Parts, *, sees_forward: bool) -> Straggler | None:
    """Return the rank that the others wait for longest, or None if that is a small part of a step.
    `sees_forward` is whether a rank also computes the forward pass before the first collective.
    """
    ranks = len(parts["data"])
    times: dict[str, list[float]] = {}
    for name in _ALL:
        if name in parts:
            times[name] = [max(0.0, value) for value in parts[name]]
    step = sum(sum(part) for part in times.values()) / ranks
    data = _totals(times, _OWN)
    before = data  # time before the first collective
    if sees_forward:
        before = _totals(times, (*_OWN, "forward"))
    rank = before.index(max(before))
    late = _excess(rank, before)
    # If the latest rank is on time, all ranks are, and the backward passes are compared.
    is_on_time = sees_forward and late < _SHARE_OF_STEP * step
    if is_on_time:
        rank = times["backward"].index(max(times["backward"]))
        late = _excess(rank, times["backward"])
    if late < _SHARE_OF_STEP * step or not step:
        return None
    if not is_on_time and _excess(rank, data) >= late / 2:
        part = "data"
        values = data
    else:
        names = _slow_passes(times, rank, late)
        part = "+".join(names)
        values = _totals(times, names)
    others = values[rank] - _excess(rank, values)
    return Straggler(rank, part, values[rank], others, data[rank], step)


def _slow_passes(times: Mapping[str, list[float]], rank: int, late: float) -> list[str]:
    """Return the passes that make a rank late by `late` ms, forward if neither does."""
    names = []
    for name in ("forward", "backward"):
        if _excess(rank, times[name]) > _SHARE_OF_BACKWARD * late:
            names.append(name)
    return names or ["forward"]


def _totals(times: Mapping[str, list[float]], names: Sequence[str]) -> list[float]:
    """Return every rank's time in several parts of a step together."""
    parts = [times[name] for name in names if name in times]
    return [sum(row) for row in zip(*parts, strict=True)]


def _excess(rank: int, values: list[float]) -> float:
    """Return a rank's value less the median of the others'."""
    return values[rank] - median(values[:rank] + values[rank + 1 :])


class Stragglers:
    """Looks for stragglers at logged points, on all ranks alike. Reports one once, and again when
    its excess has changed.
    """

    def __init__(self, hosts: Sequence[str], *, sees_forward: bool) -> None:
        self._hosts = hosts
        self._sees_forward = sees_forward
        self._step: int | None = None
        self._current: tuple[int, str] | None = None  # rank and part
        self._points = 0  # with the current straggler
        self._seconds = 0.0  # that it has cost
        self._points_without = 0
        self._reported_ms: dict[tuple[int, str], float] = {}

    def note(self, step: int, parts: Parts) -> None:
        """Look for a straggler in the times since the point before. The first point is left out, as
        it has the time of compiling.
        """
        steps = 0
        if self._step is not None:
            steps = step - self._step
        self._step = step
        straggler: Straggler | None = None
        if steps > 0:
            straggler = find(parts, sees_forward=self._sees_forward)
        if straggler is None:
            self._note_none()
            return
        key = (straggler.rank, straggler.part.partition("+")[0])
        if key != self._current:
            self._restart_counts(key)
        self._points_without = 0
        self._points += 1
        self._seconds += 0.001 * straggler.excess_ms * steps
        if self._points < _FEWEST_POINTS or self._seconds < _FEWEST_SECONDS:
            return
        reported = self._reported_ms.get(key, 0.0)
        if not reported / _CHANGE < straggler.excess_ms < reported * _CHANGE:
            self._reported_ms[key] = straggler.excess_ms
            self._report(straggler)

    def _note_none(self) -> None:
        """Note a logged point without a straggler; after 10 of them a report may come again."""
        if self._current is not None:
            self._restart_counts(None)
        self._points_without += 1
        if self._points_without >= _GONE_POINTS:
            self._reported_ms.clear()

    def _restart_counts(self, key: tuple[int, str] | None) -> None:
        """Count anew, for another straggler (rank and part) or for none."""
        self._current = key
        self._points = 0
        self._seconds = 0.0

    def _report(self, straggler: Straggler) -> None:
        host = self._hosts[straggler.rank]
        warn(
            straggler.sentence(host),
            is_of_all_ranks=True,
            kind="straggler",
            rank=straggler.rank,
            host=host,
            factor=round(straggler.factor, 2),
            part=straggler.part,
            own_ms=round(straggler.own_ms, 3),
            others_ms=round(straggler.others_ms, 3),
        )


def stragglers_of(plan: Plan) -> Stragglers:
    """Make what looks for stragglers among the ranks of a plan without stages. Collective."""
    layout = plan.layout
    is_divided = max(layout.tensor_size, layout.sequence_size, layout.expert_size) > 1
    return Stragglers(
        gather(socket.gethostname()), sees_forward=plan.config.zero.stage < 3 and not is_divided
    )
