from __future__ import annotations

import json
from typing import Any

import pytest

from framework.train.best import Best, BestSoFar, best_in
from framework.train.monitors.base import Point


def follow(best: BestSoFar, *values: float, start: int = 1, name: str = "eval/loss") -> BestSoFar:
    for step, value in enumerate(values, start=start):
        best.write(Point(step, 0.0, 0.0, {name: value, "train/loss": -99.0}))
    return best


@pytest.mark.parametrize(
    ("best_is", "values", "found"),
    [
        ("max", (1.0, 3.0, 2.0), (3.0, 2)),
        ("min", (1.0, 3.0, 2.0), (1.0, 1)),
        ("max", (3.0, 3.0, 1.0), (3.0, 2)),  # the newest of equals, as retention keeps it
        ("min", (float("nan"), float("-inf"), 4.0), (4.0, 3)),
        ("max", (float("nan"),), None),
        ("max", (), None),
    ],
)
def test_it_is_the_best_number_and_its_step(
    best_is: Any, values: tuple[float, ...], found: tuple[float, int] | None
) -> None:
    best = follow(BestSoFar("eval/loss", best_is=best_is), *values)
    assert best.found == (None if found is None else Best("eval/loss", *found))
    assert best_in(best.state()) == best.found


def test_without_a_metric_nothing_is_reported() -> None:
    best = follow(BestSoFar(None, best_is="max"), 1.0)
    assert (best.found, best.state()) == (None, {})


def test_it_goes_on_from_what_was_saved() -> None:
    """From an earlier checkpoint: what came after it is forgotten."""
    whole = BestSoFar("eval/loss", best_is="min")
    states = []
    for step, value in enumerate((5.0, 4.0, 1.0, 3.0), start=1):
        follow(whole, value, start=step)
        states.append(json.loads(json.dumps(whole.state())))
    again = BestSoFar("eval/loss", best_is="min")
    again.restore(states[1])
    assert again.found == Best("eval/loss", 4.0, 2)
    assert follow(again, 4.5, start=3).found == Best("eval/loss", 4.0, 2)
    assert follow(again, 2.0, start=4).found == Best("eval/loss", 2.0, 4)


@pytest.mark.parametrize(
    ("metric", "best_is"), [("eval/accuracy", "min"), ("eval/loss", "max"), (None, "min")]
)
def test_the_best_of_another_metric_is_none_of_this_one(metric: str | None, best_is: Any) -> None:
    best = BestSoFar(metric, best_is=best_is)
    best.restore(follow(BestSoFar("eval/loss", best_is="min"), 1.0).state())
    assert best.found is None


def test_a_checkpoint_without_one() -> None:
    best = BestSoFar("eval/loss", best_is="min")
    best.restore({"step": 3})
    assert best.found is None
    assert best_in({"step": 3}) is None
