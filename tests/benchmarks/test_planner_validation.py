"""The planner against published points: bounds that hold, and the page that shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.planner import cases, fit, memory_cases, validate
from benchmarks.planner.published import read_points
from framework.plan.fitted_rates import RATES
from tests.places import ROOT

WRITTEN = json.loads((ROOT / "benchmarks/results/planner.json").read_text(encoding="utf-8"))
MEASURED = ("tokens_per_second_per_gpu", "step_seconds", "samples_per_second", "memory_gib", "mfu")


@pytest.mark.slow
def test_throughput_is_as_written() -> None:
    rates = validate.rates_of(WRITTEN["constants_without"])
    assert validate.throughput_errors(rates) == WRITTEN["throughput"]


@pytest.mark.slow
def test_constants_are_those_that_all_other_sources_give() -> None:
    name = "nvidia-resnet"
    others = [case for case in cases.cases() if case.point["source"]["name"] != name]
    found = fit.fit(others)
    for field, value in WRITTEN["constants_without"][name].items():
        assert getattr(found, field) == pytest.approx(value, rel=1e-3), field


@pytest.mark.slow
@pytest.mark.parametrize("half", ["fit", "holdout"])
def test_memory_is_as_written(half: str) -> None:
    assert validate.memory_errors(half) == (
        WRITTEN["memory"][half],
        WRITTEN["memory_left_out"][half],
    )


def test_bounds_of_throughput() -> None:
    throughput = WRITTEN["throughput"]
    left_out = throughput["left out"]
    assert left_out["all"]["points"] >= 390
    assert left_out["all"]["median_error"] <= 0.12
    compared = left_out["all but narayanan-zero3"]
    assert compared["points"] >= 390
    assert compared["p90_error"] <= 0.35
    assert throughput["median_of_sources"] <= 0.16
    sources = set(left_out) - {"all", "all but narayanan-zero3"}
    assert len(sources) >= 13
    assert sources == set(WRITTEN["constants_without"])


@pytest.mark.slow
def test_more_devices_are_faster_at_stage_3_as_published() -> None:
    """Of 175 and of 530 billion weights, in the order of the devices."""
    for name in ("gpt-175b", "gpt-530b"):
        times = []
        for case in cases.cases():
            is_zero3 = case.point["source"]["name"] == "narayanan-zero3"
            if is_zero3 and case.point["model"]["name"] == name:
                times.append((case.point["num_gpus"], case.time().total))
        assert len(times) == 3
        assert [time for _, time in sorted(times)] == sorted(
            (time for _, time in times), reverse=True
        )


def test_bounds_of_memory() -> None:
    holdout = WRITTEN["memory"]["holdout"]
    # 64 points; 47 before pipelines with fp32 sums could be estimated, of which 17.5 % was the
    # median.
    assert holdout["all"]["median_error"] <= 0.21
    assert holdout["bigscience-tr11"]["spearman"] >= 0.85


def test_the_page_shows_what_was_written() -> None:
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    assert validate.table(WRITTEN) in page


def test_who_takes_part_does_not_depend_on_what_was_measured() -> None:
    """Only whether a figure is there counts, not which."""
    for point in read_points():
        other: dict[str, Any] = {key: 2 * point[key] for key in MEASURED if point[key] is not None}
        assert cases.left_out(point | other) == cases.left_out(point)
        assert memory_cases.memory_left_out(point | other) == memory_cases.memory_left_out(point)


def test_recomputation_that_the_source_leaves_open_follows_from_its_flops() -> None:
    open_ones = [
        point
        for point in read_points()
        if point["recompute"] == "unknown" and not cases.left_out(point)
    ]
    found = {
        cases.recompute_of(point)
        for point in open_ones
        if point["source"]["name"] == "bigscience-tr11"
    }
    assert found == {"full"}
    assert {cases.recompute_of(point) for point in open_ones} == {"full", "none"}


@pytest.mark.slow
def test_the_constants_are_the_fitted_ones() -> None:
    found = fit.fit(cases.cases())
    for name in fit.FITTED:
        assert getattr(RATES, name) == pytest.approx(getattr(found, name), rel=0.01), name


def test_ranks_of_ties_and_order() -> None:
    assert validate.ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]
    assert validate.spearman([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 40.0, 30.0]) == pytest.approx(0.8)
    assert validate.summary([(1.1, 1.0), (0.8, 1.0), (1.0, 1.0)])["median_error"] == pytest.approx(
        0.1
    )
