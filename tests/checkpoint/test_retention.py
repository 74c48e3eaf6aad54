from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.checkpointer import Retention
from framework.checkpoint.manifest import SavedCheckpoint


def saved(step: int, **metrics: Any) -> SavedCheckpoint:
    return SavedCheckpoint(
        Path("x"),
        f"global_step{step}",
        {"step": step, "metrics": {f"eval/{k}": v for k, v in metrics.items()}},
    )


def deleted(retention: Retention, checkpoints: list[SavedCheckpoint], *, newest: int) -> list[int]:
    return [checkpoint.step for checkpoint in retention.superfluous(checkpoints, newest=newest)]


STEPS = [saved(step) for step in (10, 20, 30, 40, 50)]


@pytest.mark.parametrize(
    ("retention", "newest", "gone"),
    [
        (Retention(2), 50, [10, 20, 30]),
        (Retention(9), 50, []),
        (Retention("all"), 50, []),
        (Retention(1), 30, [10, 20]),
        (Retention(1, every_steps=20), 50, [10, 30]),
        (Retention(1, every_steps=7), 50, [10, 20, 30, 40]),
    ],
)
def test_the_newest_and_every_nth_step(retention: Retention, newest: int, gone: list[int]) -> None:
    assert deleted(retention, STEPS, newest=newest) == gone


MEASURED = [
    saved(1, loss=0.5),
    saved(2, loss=0.2),
    saved(3),
    saved(4, loss=0.2),
    saved(5, loss="nan"),
    saved(6, loss=0.9),
]


@pytest.mark.parametrize(
    ("best", "best_is", "gone"),
    [
        ("eval/loss", "min", [1, 2, 3, 5]),
        ("eval/loss", "max", [1, 2, 3, 4, 5]),
        ("eval/accuracy", "max", []),  # nothing has it, so whatever goes might be what was meant
    ],
)
def test_the_best_is_kept_the_newest_of_equals(best: str, best_is: Any, gone: list[int]) -> None:
    assert deleted(Retention(1, best=best, best_is=best_is), MEASURED, newest=6) == gone


def test_a_metric_that_was_not_measured_is_reported_once_with_those_that_were() -> None:
    retention = Retention(3, best="eval/acc")
    reported = retention.describe_absence([saved(10, loss=0.5, accuracy=0.2), saved(20)], newest=10)
    assert reported.startswith(
        "checkpoint.keep_best = eval/acc: it was not measured at step 10, where eval/accuracy, eval/loss was; until "
    )
    assert retention.describe_absence([saved(10), saved(20)], newest=20) == ""
    assert retention.describe_absence([saved(10, acc=0.5)], newest=10) == ""
    assert Retention(3).describe_absence([saved(10)], newest=10) == ""


def test_a_value_that_is_no_number_is_never_the_best() -> None:
    assert (
        Retention(1, best="eval/loss").best_of(
            [saved(1, loss=float("nan")), saved(2, loss="nan"), saved(3)]
        )
        is None
    )
