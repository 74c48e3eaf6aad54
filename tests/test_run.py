"""What a run prints when it is resumed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import resume_point
from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.load import config_from_values
from framework.errors import StorageError, TrainingError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.setup import start_point
from framework.setup.resumed_start import _changed_schedule
from framework.train.run_folder import RunFolder


class LookedError(Exception):
    """Somebody has looked for checkpoints."""


def test_any_failure_on_rank0_is_an_answer_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They wait for one. It travels between processes, and is one line; the place in the code is
    told where it happened.
    """

    class OwnError(Exception):  # of a class that other processes cannot read
        pass

    def fail() -> None:
        raise OwnError("two lines,\nof the user's")

    monkeypatch.setattr(start_point, "rank", lambda: 0)
    answer = pickle.loads(pickle.dumps(start_point.on_rank0(fail)))
    assert isinstance(answer, TrainingError)
    assert "\n" not in str(answer)
    assert str(answer).endswith("OwnError: two lines, of the user's [rank0-failed]")
    assert "OwnError" in capsys.readouterr().err
    monkeypatch.setattr(start_point, "rank", lambda: 1)
    assert start_point.on_rank0(fail) is None


def test_no_other_run_may_end_between_the_look_and_the_taking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last save would be lost, or its folder renamed as one that holds no checkpoint."""
    earlier = RunFolder(tmp_path)
    earlier.open(fresh=True)
    earlier.close()

    def look(*_: Any, **__: Any) -> None:
        with pytest.raises(StorageError, match="run-folder-busy"):
            RunFolder(tmp_path).open(fresh=False)
        raise LookedError

    monkeypatch.setattr(resume_point, "find_sound_checkpoint", look)
    folder = RunFolder(tmp_path)
    with pytest.raises(LookedError):
        start_point.choose_start(folder, plan(kind="constant").config)
    folder.close()


def plan(**scheduler: Any) -> Plan:
    return make_plan(
        config_from_values({"training": {"max_steps": 30}, "scheduler": scheduler}), Cluster()
    )


def start(total_steps: int) -> SavedCheckpoint:
    return SavedCheckpoint(
        Path("runs/x/checkpoints"), "global_step10", {"step": 10, "total_steps": total_steps}
    )


@pytest.mark.parametrize("kind", ["cosine", "warmup_decay", "warmup_cosine"])
def test_a_schedule_that_ends_with_the_run_is_not_stretched_silently(kind: str) -> None:
    (note,) = _changed_schedule(start(20), plan(kind=kind))
    assert f"the {kind} schedule now ends at step 30 instead of 20" in note
    assert "scheduler.total_steps=20 keeps it" in note


@pytest.mark.parametrize(
    ("scheduler", "total_steps"),
    [
        ({"kind": "cosine"}, 30),
        ({"kind": "cosine", "total_steps": 20}, 20),
        ({"kind": "constant"}, 20),
        ({"kind": "warmup"}, 20),
    ],
)
def test_nothing_is_reported_where_nothing_changes(
    scheduler: dict[str, Any], total_steps: int
) -> None:
    assert list(_changed_schedule(start(total_steps), plan(**scheduler))) == []
