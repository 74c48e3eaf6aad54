"""Names a rank that keeps the others waiting, from the parts of a step that all ranks exchange at
logged points anyway.

What a rank does before the first collective of a step is its own: reading, and the forward pass
where no weights, positions or experts are divided. Of the backward pass a rank's own part cannot be
told from its wait for the others, where gradients are summed meanwhile; so it counts only for a
rank that is not early. Stages of a pipeline differ rightly, and are not compared.
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
# of what each step would be shorter by, to be said again: a factor may be of next to nothing
_CHANGE: Final = 1.5
_GONE_POINTS: Final = 10  # without it, for one to be forgotten


@dataclass(frozen=True)
class Straggler:
    """A rank, what it takes longer for, and its milliseconds and the median of the others' in a
    step.
    """

    rank: int
    part: str
    own_ms: float
    others_ms: float
    data_ms: float
    step_ms: float

    @property
    def excess_ms(self) -> float:
        """Time by which each step would be shorter."""
        return self.own_ms - self.others_ms

    @property
    def factor(self) -> float:
        """Compute how much longer it computes; or how much longer the step is, by the wait for its
        data.
        """
        if self.part == "data":
            return self.step_ms / max(self.step_ms - self.excess_ms, 0.01 * self.step_ms)
        return self.own_ms / max(self.others_ms, 0.01 * self.own_ms)

    def sentence(self, host: str) -> str:
        """Say it."""
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
    """The rank that the others wait for longest, if that is a part of a step to speak of."""
    ranks = len(parts["data"])
    times = {name: [max(0.0, value) for value in parts[name]] for name in _ALL if name in parts}
    step = sum(map(sum, times.values())) / ranks

    def totals(names: Sequence[str]) -> list[float]:
        return [
            sum(row) for row in zip(*(times[name] for name in names if name in times), strict=True)
        ]

    def excess(rank: int, values: list[float]) -> float:
        return values[rank] - median(values[:rank] + values[rank + 1 :])

    data = totals(_OWN)
    if sees_forward:
        before = totals((*_OWN, "forward"))
    else:
        before = data
    rank = before.index(max(before))
    late = excess(rank, before)
    is_on_time = sees_forward and late < _SHARE_OF_STEP * step  # for the backward pass, as all are
    if is_on_time:
        rank = times["backward"].index(max(times["backward"]))
        late = excess(rank, times["backward"])
    if late < _SHARE_OF_STEP * step or not step:
        return None
    if not is_on_time and excess(rank, data) >= late / 2:
        part = "data"
        values = data
    else:
        names = [
            name
            for name in ("forward", "backward")
            if excess(rank, times[name]) > _SHARE_OF_BACKWARD * late
        ]
        names = names or ["forward"]
        part = "+".join(names)
        values = totals(names)
    return Straggler(
        rank, part, values[rank], values[rank] - excess(rank, values), data[rank], step
    )


class Stragglers:
    """Looks at logged points, on all ranks alike; says a finding once, and again where it has
    changed.
    """

    def __init__(self, hosts: Sequence[str], *, sees_forward: bool) -> None:
        self._hosts = hosts
        self._sees_forward = sees_forward
        self._step: int | None = None
        self._now: tuple[int, str] | None = None
        self._points = 0
        self._seconds = 0.0
        self._gone = 0
        self._stated: dict[tuple[int, str], float] = {}

    def note(self, step: int, parts: Parts) -> None:
        """Look at what each rank was busy with since the point before; the first one pays for
        compiling.
        """
        steps = step - (step if self._step is None else self._step)
        self._step = step
        if steps > 0:
            found = find(parts, sees_forward=self._sees_forward)
        else:
            found = None
        if found is None:
            now = None
        else:
            now = (found.rank, found.part.partition("+")[0])
        if now != self._now:
            self._now = now
            self._points = 0
            self._seconds = 0.0
        if found is None or now is None:
            self._gone += 1
            if self._gone >= _GONE_POINTS:
                self._stated.clear()
            return
        self._gone = 0
        self._points = self._points + 1
        self._seconds += 0.001 * found.excess_ms * steps
        if self._points < _FEWEST_POINTS or self._seconds < _FEWEST_SECONDS:
            return
        before = self._stated.get(now, 0.0)
        if not before / _CHANGE < found.excess_ms < before * _CHANGE:
            self._stated[now] = found.excess_ms
            self._report(found)

    def _report(self, found: Straggler) -> None:
        host = self._hosts[found.rank]
        facts = {
            "rank": found.rank,
            "host": host,
            "factor": round(found.factor, 2),
            "part": found.part,
        }
        times = {"own_ms": round(found.own_ms, 3), "others_ms": round(found.others_ms, 3)}
        warn(found.sentence(host), is_of_all_ranks=True, kind="straggler", **facts, **times)


def stragglers_of(plan: Plan, world_size: int) -> Stragglers | None:
    """Make what looks for slow ranks; None where there are none to compare. Collective."""
    layout = plan.layout
    if world_size == 1 or layout.pipe_size > 1:
        return None
    is_divided = max(layout.tensor_size, layout.sequence_size, layout.expert_size) > 1
    return Stragglers(
        gather(socket.gethostname()), sees_forward=plan.config.zero.stage < 3 and not is_divided
    )
