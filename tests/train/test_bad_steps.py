"""What becomes of bad steps, without an engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from framework.engine_protocol import BadStep
from framework.errors import TrainingError
from framework.train.bad_step_policy import BadStepPolicy
from framework.train.bad_steps import LeftOut, RolledBack, noted_windows


class Seen:
    """A watch that has seen some steps."""

    has_news = False

    def __init__(self, *found: BadStep) -> None:
        self._found = found

    def read(self) -> list[BadStep]:
        return list(self._found)


def bad(step: int = 7, **changes: Any) -> BadStep:
    values = {"loss": 9.25, "grad_norm": 1.0, "loss_limit": 3.5, "norm_limit": math.inf}
    return BadStep(step, **(values | changes))


def policy(word: str, left_out: LeftOut | None = None) -> BadStepPolicy:
    return BadStepPolicy(word, 2, Seen(), left_out or LeftOut(), pass_over=pytest.fail)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (bad(), "step 7: train/loss = 9.25, above 3.5"),
        (bad(loss=math.nan, ranks=("rank 3",)), "step 7: train/loss = nan (rank 3)"),
        (bad(loss=1.0, grad_norm=math.inf), "step 7: train/grad_norm = inf"),
        (
            bad(grad_norm=math.nan, verdict="persistent"),
            "step 7: train/loss = 9.25, above 3.5 and train/grad_norm = nan; computed again it is the same: "
            "persistent, of the data or the model",
        ),
        (
            bad(verdict="transient", ranks=("rank 1 on b",)),
            "step 7: train/loss = 9.25, above 3.5 (rank 1 on b); computed again it is another: transient, suspect the "
            "hardware (the ranks named)",
        ),
    ],
)
def test_a_bad_step_states_what_was_wrong(step: BadStep, text: str) -> None:
    assert str(step) == text


def test_an_event_is_json() -> None:
    details = json.loads(
        json.dumps(bad(loss=math.nan, ranks=("rank 3",)).details(), allow_nan=False)
    )
    assert details == {
        "loss": "nan",
        "grad_norm": 1.0,
        "loss_limit": 3.5,
        "norm_limit": "inf",
        "ranks": ["rank 3"],
    }


def test_skipped_steps_are_noted_and_stop_nothing() -> None:
    noted: list[str] = []
    policy("skip").follow([bad(3), bad(5)], note=noted.append)
    assert [text.partition(":")[0] for text in noted] == ["step 3", "step 5"]
    policy("stop").follow([bad(3, verdict="transient", is_taken=True)], note=noted.append)
    assert noted[-1].endswith("the second result is taken [bad-step]")


def test_a_run_stops_at_the_first_bad_step_or_goes_back() -> None:
    with pytest.raises(TrainingError, match=r"step 3: .*\[bad-step\]"):
        policy("stop").follow([bad(3), bad(5)], note=pytest.fail)
    with pytest.raises(RolledBack) as found:
        policy("roll_back").follow([bad(3), bad(5)], note=pytest.fail)
    assert found.value.bad.step == 3
    known = LeftOut()
    known.add([(1, 2), (4, 5)])
    with pytest.raises(TrainingError, match="max_roll_backs = 2, and so often it has gone back"):
        policy("roll_back", known).follow([bad(6)], note=pytest.fail)


def test_what_is_left_out_comes_from_checkpoints_and_events(tmp_path: Path) -> None:
    first, second = LeftOut(), LeftOut()
    assert first.state() == {}
    first.add([(5, 7)])
    path = tmp_path / "events.jsonl"
    line = {"step": 30, "kind": "roll_back", "to": 20, "first": 21, "last": 30}
    path.write_text(
        f'{json.dumps(line)}\n{{"kind": "save", "step": 4}}\n{{"kind": "roll_b', encoding="utf-8"
    )
    second.restore(json.loads(json.dumps(first.state())))
    second.add(noted_windows(path))
    assert second.windows == [(5, 7), (21, 30)]
    assert [step for step in range(1, 40) if step in second] == [5, 6, 7, *range(21, 31)]
    assert noted_windows(tmp_path / "none") == []
