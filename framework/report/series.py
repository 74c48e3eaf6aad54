"""Points of one metric in bounded memory: in a long run a point stands for several logged ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal

MOST_POINTS: Final = 10_000
"""Of a series; up to twice as many are kept."""

Thinning = Literal["extremes", "means", "last"]
"""What is kept of four points: the least and the largest value; the means of each two, weighted by
their steps, so that sums over steps stay what they are; or the second of each two.
"""


@dataclass
class Series:
    """Values of one metric; NaN where it was not finite. Steps never fall.

    Attributes:
        steps, values: of the points that are kept.
        thinning: of a series that is added to.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    thinning: Thinning = "extremes"
    _stride: int = 1  # points that were added for each that is kept
    _num_thinned: int = 0  # of the points that are kept; those after them are as they were added

    @property
    def is_thinned(self) -> bool:
        """Check whether a point stands for several."""
        return self._stride > 1

    @cached_property
    def finite(self) -> list[tuple[int, float]]:
        """Points that are numbers; computed anew once a point was added."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    @property
    def finite_values(self) -> list[float]:
        """Values that are numbers."""
        return [value for _, value in self.finite]

    def add(self, step: int, value: float) -> None:
        """Add a point, and thin earlier ones so that the number of points stays bounded. The last
        points stay as they are: there is always one of the last step.
        """
        self.__dict__.pop("finite", None)
        # Two of these points will stand for `_stride` points each, as the thinned ones do.
        tail = min(2 * self._stride, MOST_POINTS // 2)
        if self._stride > 1 and len(self.steps) - self._num_thinned >= tail:
            self._thin_tail(tail)
        if len(self.steps) >= 2 * MOST_POINTS:
            self._thin()
        self.steps.append(step)
        self.values.append(value)

    def sort(self) -> None:
        """Put the points in order of steps, if a file was put together by hand."""
        steps = self.steps
        if any(later < step for step, later in pairwise(steps)):
            pairs = sorted(zip(steps, self.values, strict=True), key=lambda pair: pair[0])
            self._put(0, len(steps), pairs)

    def _thin_tail(self, num: int) -> None:
        """Replace the first `num` points after the thinned ones by two."""
        begin = self._num_thinned
        end = begin + num
        kept = self._two_of(begin, end)
        self._put(begin, end, kept)
        self._num_thinned = begin + 2

    def _thin(self) -> None:
        """Replace every four thinned points, at first every four of all, by two; each then stands
        for twice as many.
        """
        num = self._num_thinned if self._stride > 1 else len(self.steps)
        num -= num % 4
        kept: list[tuple[int, float]] = []
        for begin in range(0, num, 4):
            kept += self._two_of(begin, begin + 4)
        self._put(0, num, kept)
        self._num_thinned = len(kept)
        self._stride *= 2

    def _put(self, begin: int, end: int, points: Sequence[tuple[int, float]]) -> None:
        """Replace the points from `begin` to before `end`."""
        self.steps[begin:end] = [step for step, _ in points]
        self.values[begin:end] = [value for _, value in points]

    def _two_of(self, begin: int, end: int) -> list[tuple[int, float]]:
        """Return two points (step, value) that stand for those from `begin` to before `end`, by
        `thinning`.
        """
        middle = (begin + end) // 2
        if self.thinning == "means":
            return [self._mean(begin, middle), self._mean(middle, end)]
        if self.thinning == "last":
            chosen = [middle - 1, end - 1]
        else:
            chosen = _extremes(self.values, begin, end)
        return [(self.steps[at], self.values[at]) for at in chosen]

    def _mean(self, begin: int, end: int) -> tuple[int, float]:
        """Return the last step of the points from `begin` to before `end`, and the mean of their
        finite values weighted by steps.
        """
        before = self.steps[begin - 1] if begin else 0
        total = 0.0
        weight = 0
        for at in range(begin, end):
            value = self.values[at]
            num = self.steps[at] - before
            before = self.steps[at]
            if num > 0 and math.isfinite(value):
                total += num * value
                weight += num
        if weight:
            return self.steps[end - 1], total / weight
        return self.steps[end - 1], self.values[end - 1]


def _extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Return the two indices, from `begin` to before `end`, of the least and the largest finite
    value; without two of them, of the last other values as well.
    """
    finite = [at for at in range(begin, end) if math.isfinite(values[at])]
    if len(finite) < 2:
        others = [at for at in range(begin, end) if at not in finite]
        two = (finite + others[-2:])[:2]
        return sorted(two)
    least = min(finite, key=values.__getitem__)
    largest = max(finite, key=values.__getitem__)
    if least == largest:  # all are equal
        return [finite[0], finite[-1]]
    return sorted((least, largest))
