"""Repeated measurements of variants of a run: medians, their spread, and whether a difference is
more than noise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import mean, median, quantiles
from typing import Any, Final

from framework.plan.plan import Plan
from framework.report.records import RunRecords

_DRAWS: Final = 4000
_MEASURED: Final = ("time/", "throughput/", "memory/")


@dataclass
class Variant:
    """One way to train, and what was measured of it.

    Attributes:
        name, settings: what it is called, and what makes it differ.
        plan: what is trained.
        rounds: of each start its windows, each with the means of its metrics.
        busy_cores: of each start, the mean number of cores that other work took, where that is
            known.
        failure: why it does not run; empty where it does.
    """

    name: str
    settings: str
    plan: Plan
    rounds: list[list[dict[str, float]]] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def rates(self) -> list[list[float]]:
        """Samples per second of every window, by start; none where it failed."""
        of_a_second = 1000.0 * self.plan.layout.global_size
        if self.failure:
            return []
        return [[of_a_second / each["time/step_ms"] for each in start] for start in self.rounds]

    @property
    def windows(self) -> list[float]:
        """The same, of all starts together."""
        return [*chain(*self.rates)]

    @property
    def quartiles(self) -> list[float]:
        """Quartiles of `windows`, of which there is at least one; linear between neighbours."""
        if len(self.windows) > 1:
            return quantiles(self.windows, n=4, method="inclusive")
        return 3 * self.windows

    def means(self) -> dict[str, float]:
        """Mean of every metric over all windows, so that parts of a step add up to the whole."""
        windows = [*chain(*self.rounds)]
        if self.windows:
            return {name: mean(each.get(name, 0.0) for each in windows) for name in windows[0]}
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with every window."""
        places = {"devices": str(self.plan.cluster), "samples": str(self.plan.layout)}
        return vars(self) | {
            "plan": places,
            "samples_per_sec": self.rates,
            "quartiles": self.windows and self.quartiles,
        }


def interval_of_ratio(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Find the 95 % interval of the ratio of two medians, of windows by start.

    A bootstrap of rounds, and of windows within each: what was slow for both in a round stays
    together, and is no difference (a block bootstrap: Davison and Hinkley 1997, section 3.8).
    """
    chance = random.Random(0)
    rounds = range(min(len(base), len(other)))
    ratios = []
    for _ in range(_DRAWS):
        chosen = chance.choices(rounds, k=len(rounds))
        below, above = (
            median([v for r in chosen for v in chance.choices(one[r], k=len(one[r]))])
            for one in (base, other)
        )
        ratios.append(above / below)
    ratios.sort()
    return ratios[int(0.025 * _DRAWS)], ratios[int(0.975 * _DRAWS) - 1]


def compare(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Compare every variant that ran with the first that did; no interval where one was started
    only once.
    """
    found = []
    ran = [each for each in variants if each.windows]
    for base, other in ((ran[0], other) for other in ran[1:]):
        ratio = median(other.windows) / median(base.windows)
        ends = None
        sentence = f"{other.name} is {ratio:.3g} times as fast as {base.name}"
        if min(len(base.rates), len(other.rates)) < 2:
            sentence += "; noise is not known from one start"
        else:
            ends = interval_of_ratio(base.rates, other.rates)
            sure = f"95 %: {ends[0]:.3g} to {ends[1]:.3g}"
            noise = (
                f"{other.name} and {base.name}: no difference beyond noise (ratio "
                f"{ratio:.3g}, {sure})"
            )
            if ends[0] <= 1 <= ends[1]:
                sentence = noise
            else:
                sentence = f"{sentence} ({sure})"
        found.append(
            {
                "variant": other.name,
                "over": base.name,
                "ratio": ratio,
                "interval": ends,
                "sentence": sentence,
            }
        )
    return found


def windows_of(run: RunRecords, *, dropped: int, size: int) -> list[dict[str, float]]:
    """Means of every metric over windows of so many points, after those that are dropped; one cut
    short is left out.
    """
    found = {
        name: each.values[dropped:]
        for name, each in run.metrics.items()
        if name.startswith(_MEASURED)
    }
    num = len(found.get("time/step_ms", ())) // size
    return [
        {name: mean(each[size * n : size * (n + 1)]) for name, each in found.items()}
        for n in range(num)
    ]
