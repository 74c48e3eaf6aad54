"""Statistics of repeated measurements, held against numpy and against cases that can be worked out
by hand.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.report import repeats
from framework.report.records import RunRecords, Series
from framework.report.repeats import Variant, compare, interval_of_ratio, windows_of

PLAN = make_plan(
    config_from_values({"batch": {"global_size": 100}, "training": {"max_steps": 9}}),
    Cluster(device="cpu"),
)


def variant(name: str, *rounds: list[float], **further: str) -> Variant:
    """A variant whose windows have these samples per second."""
    return Variant(
        name,
        "",
        PLAN,
        [[{"time/step_ms": 1e5 / rate} for rate in start] for start in rounds],
        **further,
    )


def test_samples_per_second_and_their_quartiles() -> None:
    rates = [50.0, 20.0, 40.0, 80.0, 10.0]
    found = variant("a", rates[:2], rates[2:])
    assert found.windows == pytest.approx(rates)
    assert found.quartiles == pytest.approx(np.quantile(rates, [0.25, 0.5, 0.75]))
    assert variant("a", [7.0]).quartiles == pytest.approx([7, 7, 7])
    assert variant("a", rates, failure="no memory").windows == []


@pytest.mark.slow
def test_the_interval_is_numpys_of_the_same_bootstrap() -> None:
    chance = np.random.default_rng(1)
    base, other = (chance.lognormal(mean, 0.1, (3, 4)) for mean in (0.0, 0.3))
    drawn = []
    for _ in range(6_000):
        rounds = chance.integers(0, 3, 3)
        medians = [np.median([chance.choice(each[r], 4) for r in rounds]) for each in (base, other)]
        drawn.append(medians[1] / medians[0])
    found = interval_of_ratio(base.tolist(), other.tolist())
    assert found == pytest.approx(np.quantile(drawn, [0.025, 0.975]), rel=0.02)
    # the same figures give the same sentence
    assert found == interval_of_ratio(base.tolist(), other.tolist())


def test_what_is_slow_for_all_in_a_round_is_no_difference() -> None:
    base = [[10.0, 10.0], [5.0, 5.0], [20.0, 20.0]]
    assert interval_of_ratio(
        base, [[1.5 * rate for rate in start] for start in base]
    ) == pytest.approx((1.5, 1.5))


def test_about_95_of_100_intervals_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_DRAWS", 400)
    chance, held = random.Random(3), 0
    for _ in range(40):
        drift = [chance.gauss(0, 2) for _ in range(5)]
        one, two = (
            [[100 + d + chance.gauss(0, 2) for _ in range(2)] for d in drift] for _ in range(2)
        )
        low, high = interval_of_ratio(one, two)
        held += low <= 1 <= high
    assert held >= 34


def test_sentences() -> None:
    base = variant("A", [100.0, 101.0], [99.0])
    faster, same = variant("B", [131.0, 132.0], [130.0]), variant("C", [99.0, 102.0], [100.5])
    slower, once = variant("D", [50.0, 51.0], [49.0]), variant("E", [200.0])
    failed = variant("F", failure="exit code 70: no memory [out-of-memory]")
    found = compare([failed, base, faster, same, slower, once])
    assert [each["variant"] for each in found] == ["B", "C", "D", "E"]
    assert {each["over"] for each in found} == {"A"}  # the first that ran
    assert found[0]["ratio"] == pytest.approx(1.31)
    low, high = found[0]["interval"]
    assert low <= 1.31 <= high
    assert found[0]["sentence"] == f"B is 1.31 times as fast as A (95 %: {low:.3g} to {high:.3g})"
    assert found[1]["sentence"].startswith("C and A: no difference beyond noise (ratio 1")
    assert found[2]["sentence"].startswith("D is 0.5 times as fast as A (95 %: 0.4")
    assert found[3] == {
        "variant": "E",
        "over": "A",
        "ratio": pytest.approx(2),
        "interval": None,
        "sentence": "E is 2 times as fast as A; noise is not known from one start",
    }
    assert compare([failed]) == []


def test_windows_leave_out_the_warm_up_and_what_was_cut_short() -> None:
    steps = list(range(2, 18, 2))
    run = RunRecords(Path("run"))
    run.metrics["time/step_ms"] = Series(steps, [n / 2 for n in steps])
    run.metrics["time/data_ms"] = run.metrics["train/loss"] = Series(steps, [1.0] * 8)
    assert windows_of(run, dropped=2, size=3) == [
        {"time/step_ms": 4.0, "time/data_ms": 1.0},
        {"time/step_ms": 7.0, "time/data_ms": 1.0},
    ]
    assert windows_of(run, dropped=2, size=4) == [{"time/step_ms": 4.5, "time/data_ms": 1.0}]
    assert windows_of(RunRecords(Path("run")), dropped=0, size=1) == []
