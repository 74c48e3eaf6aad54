"""Long series are thinned out while they are read: sums, peaks and the last point stay."""

from __future__ import annotations

import math
import random

import pytest

from framework.report import series as series_module
from framework.report.series import Series


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_module, "MOST_POINTS", 100)


def filled(
    count: int, thinning: series_module.Thinning, *, every: int = 1
) -> tuple[Series, list[float]]:
    draw = random.Random(count)
    values = [draw.lognormvariate(0.0, 1.0) for _ in range(count)]
    series = Series(thinning=thinning)
    for number, value in enumerate(values, start=1):
        series.add(every * number, value)
        assert len(series.steps) == len(series.values) <= 200
        assert (series.steps[-1], series.values[-1]) == (every * number, value)
    return series, values


@pytest.mark.parametrize("count", [0, 1, 5, 199, 200, 201, 202, 203, 400, 999, 12_345])
def test_sums_over_steps_stay_what_they_are(count: int) -> None:
    series, values = filled(count, "means", every=10)
    before = 0
    total = 0.0
    for step, value in zip(series.steps, series.values, strict=True):
        total += (step - before) * value
        before = step
    assert total == pytest.approx(10 * sum(values))
    assert series.steps == sorted(set(series.steps))
    assert series.is_thinned == (count > 200)


@pytest.mark.parametrize("count", [5, 200, 201, 999, 12_345])
def test_no_peak_is_lost(count: int) -> None:
    series, values = filled(count, "extremes")
    assert (min(series.values), max(series.values)) == (min(values), max(values))
    assert all(
        values[step - 1] == value for step, value in zip(series.steps, series.values, strict=True)
    )
    assert series.steps == sorted(set(series.steps))


def test_points_are_spread_alike_from_begin_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_module, "MOST_POINTS", 1000)
    series = Series(thinning="last")
    for step in range(1, 50_001):
        series.add(step, 1.0)
    assert 900 <= len(series.steps) <= 2000
    halves = [
        sum(step <= 25_000 for step in series.steps),
        sum(step > 25_000 for step in series.steps),
    ]
    assert min(halves) > 0.4 * sum(halves)


def test_values_that_are_not_finite() -> None:
    for thinning in ("extremes", "means", "last"):
        series = Series(thinning=thinning)  # type: ignore[arg-type]
        for step in range(1, 1001):
            series.add(step, math.nan if step % 7 else 1.0)
        assert len(series.steps) <= 200
        assert {value for _, value in series.finite} == {1.0}
        assert series.steps == sorted(set(series.steps))


def test_what_is_finite_is_new_after_an_addition() -> None:
    series = Series()
    series.add(1, 1.0)
    assert series.finite == [(1, 1.0)]
    series.add(2, 2.0)
    assert series.finite == [(1, 1.0), (2, 2.0)]
