"""Repeated measurements of variants of a run: medians, their spread, and whether a difference is
more than noise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
        name, settings: its name, and the settings that make it differ.
        plan: what is trained.
        rounds: the windows of each start, each with the means of its metrics.
        busy_cores: for each start, the mean number of cores that other work took, if that is known.
        failure: why it does not run; empty if it does.
    """

    name: str
    settings: str
    plan: Plan
    rounds: list[list[dict[str, float]]] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def rates(self) -> list[list[float]]:
        """Samples per second of every window, by start; none if it failed."""
        if self.failure:
            return []
        return [[self._rate(window) for window in start] for start in self.rounds]

    def _rate(self, window: Mapping[str, float]) -> float:
        return 1000.0 * self.plan.layout.global_size / window["time/step_ms"]

    @property
    def windows(self) -> list[float]:
        """Samples per second of every window of all starts."""
        return list(chain(*self.rates))

    @property
    def quartiles(self) -> list[float]:
        """Quartiles of `windows`, which must have at least one; linear between neighbours."""
        if len(self.windows) > 1:
            return quantiles(self.windows, n=4, method="inclusive")
        return 3 * self.windows

    def means(self) -> dict[str, float]:
        """Return the mean of every metric over all windows, so that parts of a step add up to the
        step's time.
        """
        if not self.windows:
            return {}
        windows = list(chain(*self.rounds))
        return {name: mean(window.get(name, 0.0) for window in windows) for name in windows[0]}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with every window."""
        places = {"devices": str(self.plan.cluster), "samples": str(self.plan.layout)}
        return vars(self) | {
            "plan": places,
            "samples_per_sec": self.rates,
            "quartiles": self.windows and self.quartiles,
        }


def interval_of_ratio(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Return both ends of the 95 % interval of the ratio median(other) / median(base); each has,
    for every start, the rates of its windows.

    A bootstrap of rounds, and of windows within each: what was slow for both in a round stays
    together, and is no difference (a block bootstrap: Davison and Hinkley 1997, section 3.8).
    """
    draws = random.Random(0)
    rounds = range(min(len(base), len(other)))

    def resampled_median(windows_of: Sequence[Sequence[float]], chosen: Sequence[int]) -> float:
        values = []
        for number in chosen:
            windows = windows_of[number]
            values += draws.choices(windows, k=len(windows))
        return median(values)

    ratios = []
    for _ in range(_DRAWS):
        chosen = draws.choices(rounds, k=len(rounds))
        base_median = resampled_median(base, chosen)
        other_median = resampled_median(other, chosen)
        ratios.append(other_median / base_median)
    ratios.sort()
    return ratios[int(0.025 * _DRAWS)], ratios[int(0.975 * _DRAWS) - 1]


def compare(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Compare every variant that ran with the first that did; without an interval if one of them
    was started only once.
    """
    ran = [variant for variant in variants if variant.windows]
    return [_comparison(ran[0], other) for other in ran[1:]]


def _comparison(base: Variant, other: Variant) -> dict[str, Any]:
    ratio = median(other.windows) / median(base.windows)
    ends = None
    sentence = f"{other.name} is {ratio:.3g} times as fast as {base.name}"
    if min(len(base.rates), len(other.rates)) < 2:
        sentence += "; noise is not known from one start"
    else:
        ends = interval_of_ratio(base.rates, other.rates)
        sure = f"95 %: {ends[0]:.3g} to {ends[1]:.3g}"
        if ends[0] <= 1 <= ends[1]:
            names = f"{other.name} and {base.name}"
            sentence = f"{names}: no difference beyond noise (ratio {ratio:.3g}, {sure})"
        else:
            sentence += f" ({sure})"
    return {
        "variant": other.name,
        "over": base.name,
        "ratio": ratio,
        "interval": ends,
        "sentence": sentence,
    }


def windows_of(run: RunRecords, *, dropped: int, size: int) -> list[dict[str, float]]:
    """Return the means of every metric over windows of `size` points, after the dropped ones; a
    window that is cut short is left out.
    """
    values_of = {}
    for name, series in run.metrics.items():
        if name.startswith(_MEASURED):
            values_of[name] = series.values[dropped:]
    num_windows = len(values_of.get("time/step_ms", ())) // size
    windows = []
    for number in range(num_windows):
        points = slice(size * number, size * (number + 1))
        windows.append({name: mean(values[points]) for name, values in values_of.items()})
    return windows
