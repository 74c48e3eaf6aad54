"""A job that fails is started again from its newest checkpoint, and ends as the unbroken one; or is
given up.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.checkpoint.names import CHECKPOINTS, MANIFEST, tag_of
from framework.config.load import config_from_values
from framework.launch import supervision
from framework.launch.supervision import JobEnd, NextStart, Restarts, further_settings
from framework.load_run import load_run
from framework.report.goodput import goodput
from framework.report.records import read_run
from tests.forked_launchers import launch
from tests.launched import TIMEOUT_SECONDS, series
from tests.places import ROOT
from tests.warm_ranks import WarmRanks

LOST, ERROR = (
    JobEnd(137, cause="rank 1: killed by SIGKILL"),
    "rank 0: ended with 70: ",
)


class Starts:
    """Stand-in for the job: each start saves up to a step, if any, and ends."""

    def __init__(self, folder: Path, *ends: tuple[JobEnd, int]) -> None:
        self.folder, self.ends = folder, iter(ends)
        self.words: list[tuple[str, ...]] = []

    def __call__(self, words: tuple[str, ...]) -> JobEnd:
        self.words.append(words)
        end, step = next(self.ends)
        if step:
            place = self.folder / "run" / CHECKPOINTS / tag_of(step)
            place.mkdir(parents=True, exist_ok=True)
            (place / MANIFEST).write_text(f"{len(self.words)}")
        return end


def run(
    folder: Path,
    starts: Callable[[tuple[str, ...]], JobEnd],
    most: int = 5,
) -> int:
    """Start as often as `Restarts` decides, and return the exit code of the job."""
    section = {"max_restarts": most, "wait_seconds": 0}
    config = config_from_values({"run": {"output_dir": str(folder)}, "supervision": section})
    restarts = Restarts(config)
    again: NextStart | None = NextStart(0.0, "")
    while again is not None:
        restarts.begin()
        again = restarts.after(starts(further_settings(resumes=restarts.resumes)))
    return restarts.code


AUTO = ("checkpoint.resume=auto",)


def test_a_lost_rank_costs_one_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(tmp_path, (LOST, 10), (JobEnd(0), 20))
    assert run(tmp_path, starts) == 0
    assert starts.words == [(), AUTO]
    assert "start 2 of at most 6, from step 10, in 0 s [restart]" in capsys.readouterr().err


def test_options_of_the_first_start_hold_until_a_checkpoint_is_saved(tmp_path: Path) -> None:
    old = tmp_path / "run" / CHECKPOINTS / tag_of(40)
    old.mkdir(parents=True)
    (old / MANIFEST).touch()  # of an earlier run, which the first start would have moved aside
    starts = Starts(tmp_path, (LOST, 0), (LOST, 10), (JobEnd(0), 0))
    assert run(tmp_path, starts) == 0
    assert starts.words == [(), (), AUTO]


@pytest.mark.parametrize("code", [0, 75, 78, 64])
def test_no_other_start_where_it_would_change_nothing(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, Starts(tmp_path, (JobEnd(code), 10))) == code


def test_the_same_error_at_the_same_step_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = [
        (JobEnd(70, cause=ERROR + f"step 12: nan after 12.{n} s at 12:00:0{n}"), 10)
        for n in range(2)
    ]
    assert run(tmp_path, Starts(tmp_path, ends[0], (ends[1][0], 0), (ends[1][0], 0))) == 77
    assert (
        "the same error at the same step again; the job ends [no-restart]"
        in capsys.readouterr().err
    )


def test_other_errors_get_three_starts_without_progress(tmp_path: Path) -> None:
    starts = Starts(
        tmp_path, *((JobEnd(70, cause=f"{ERROR}{cause}"), 0) for cause in ("a", "b", "c", "d"))
    )
    assert run(tmp_path, starts) == 77
    assert len(starts.words) == 3
    starts = Starts(tmp_path, *((LOST, 0) for _ in range(9)))
    assert run(tmp_path, starts) == 77
    assert len(starts.words) == 3


def test_progress_gives_new_starts_until_the_budget_is_used_up(tmp_path: Path) -> None:
    starts = Starts(tmp_path, *((LOST, 10 * number) for number in range(1, 9)))
    assert run(tmp_path, starts, most=4) == 137
    assert len(starts.words) == 5
    assert run(tmp_path, Starts(tmp_path, (LOST, 5)), most=0) == 137


def _rename(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replace(folder: Path) -> None:
    _rename(folder)
    folder.mkdir()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder / CHECKPOINTS)
    (folder / CHECKPOINTS).mkdir()


@pytest.mark.parametrize("happens", [_rename, _replace, _empty, shutil.rmtree])
@pytest.mark.parametrize("is_seen", ["after a start", "while it runs", "by its line"])
def test_checkpoints_that_are_gone_are_the_end(
    tmp_path: Path,
    happens: Callable[[Path], object],
    is_seen: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "_LOOK_SECONDS", 0.05)
    has_seen = threading.Event()
    look = supervision._Folder.newest_step

    def newest_step(folder: Any) -> int:
        step = look(folder)
        # The threads of other tests' jobs look on, at their own folders.
        if step > 0 and folder._path == tmp_path / "run":
            has_seen.set()
        return step

    monkeypatch.setattr(supervision._Folder, "newest_step", newest_step)
    is_first = is_seen == "after a start"
    end = LOST
    if is_seen == "by its line":
        monkeypatch.setattr(supervision, "_LOOK_SECONDS", 60.0)
        end = JobEnd(74, cause="rank 0: ended with 74", is_folder_lost=True)
    starts = Starts(
        tmp_path, (LOST, 10 if is_first else 0), (end, 0 if is_first else 10), (JobEnd(0), 0)
    )

    def start(words: tuple[str, ...]) -> JobEnd:
        found = starts(words)
        if len(starts.words) == 2:
            if is_seen == "while it runs":
                assert has_seen.wait(60)
            happens(tmp_path / "run")
        return found

    assert run(tmp_path, start) == 74
    assert len(starts.words) == 2
    printed = capsys.readouterr().err
    assert "gone; put them back under its name, and start with checkpoint.resume=auto" in printed
    assert ("up to step 10" in printed) == (is_seen != "by its line")


def test_checkpoints_that_only_the_events_know_of_are_the_end(tmp_path: Path) -> None:
    """The folder was emptied between two looks; an earlier run without any checkpoint left is no
    reason.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    event = json.dumps({"kind": "save", "step": 5}) + "\n"
    (folder / "events.jsonl").write_text(event)
    assert run(tmp_path, Starts(tmp_path, (LOST, 0), (JobEnd(0), 0))) == 0

    def start(words: tuple[str, ...]) -> JobEnd:
        with (folder / "events.jsonl").open("a") as file:
            file.write(event)
        return LOST

    assert run(tmp_path, start) == 74


def test_a_folder_that_is_back_is_gone_on_with(tmp_path: Path) -> None:
    end = JobEnd(74, cause="rank 0: ended with 74", is_folder_lost=True)
    starts = Starts(tmp_path, (end, 10), (JobEnd(0), 0))
    assert run(tmp_path, starts) == 0
    assert starts.words == [(), AUTO]


def test_a_job_that_was_stopped_on_request_does_not_start_again(tmp_path: Path) -> None:
    config = config_from_values(
        {"run": {"output_dir": str(tmp_path)}, "supervision": {"max_restarts": 1}}
    )
    restarts = Restarts(config)
    assert restarts.after(LOST, is_asked=True) is None
    assert restarts.code == 137
    assert restarts.after(LOST) is not None


def test_the_agent_of_a_lost_host_hears_of_what_is_saved(tmp_path: Path) -> None:
    config = config_from_values(
        {"run": {"output_dir": str(tmp_path)}, "supervision": {"max_restarts": 3}}
    )
    launcher = Restarts(config)
    assert launcher.state_after_losses(1)["resumes"] is False
    Starts(tmp_path, (LOST, 10))(())
    state = launcher.state_after_losses(2)
    agent = Restarts(config)
    agent.restore(state)
    assert (agent.number, agent.resumes) == (2, True)


def test_a_job_without_restarts_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("supervision: {max_restarts: 3}\n")
    job = load_run(str(tmp_path / "run.yaml"), [])
    job.print_notes(is_supervised=True)
    assert capsys.readouterr().err == ""
    job.print_notes()
    said = capsys.readouterr().err
    assert "run.yaml:1" in said
    assert "supervision.max_restarts = 3: no launcher starts the run again here" in said


def write_config(folder: Path, name: str, dies: dict[str, Any] | None, **sections: Any) -> Path:
    config: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [32], "dropout": 0.3},
        "data": {"target": "tests.jobs.parts:slow_images", "args": {"seconds": 0.0}},
        "zero": {"stage": 2},
        "training": {"max_steps": 16, "log_every": 1},
        "checkpoint": {"every_steps": 5},
        "callbacks": [{"target": "tests.jobs.dying:Dies", "args": dies}] if dies else [],
        "supervision": {"max_restarts": 4, "wait_seconds": 0.1},
        "monitors": {"tensorboard": False, "progress": "off"},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def launched(warm: WarmRanks, config: Path, *words: str) -> tuple[int, str]:
    """Start a run of two ranks through `launch`."""
    words = ("launch", str(config), "--num_gpus", "2", *words)
    folder = config.parent / f"{config.stem}-said"
    job = launch(warm, "framework", *words, folder=folder, cwd=ROOT)
    (code,) = job.wait(TIMEOUT_SECONDS)
    return code, job.stated()


@pytest.mark.slow
@pytest.mark.timing
def test_a_killed_rank_and_the_unbroken_run(warm: WarmRanks, tmp_path: Path) -> None:
    dies = {"step": 8, "once": str(tmp_path / "once")}
    code, stated = launched(warm, write_config(tmp_path, "killed", dies), "checkpoint.resume=never")
    assert code == 0, stated
    assert "start 2 of at most 5, from step 5" in (killed := stated)
    config = write_config(tmp_path, "whole", None, supervision={})
    whole = warm.start(["--config", str(config)], num_ranks=2, folder=tmp_path / "said")
    assert whole.wait(TIMEOUT_SECONDS) == [0, 0], whole.stated()
    assert series(tmp_path / "killed", "train/loss") == series(tmp_path / "whole", "train/loss")
    events = [
        json.loads(line) for line in (tmp_path / "killed/events.jsonl").read_text().splitlines()
    ]
    (event,) = [event for event in events if event["kind"] == "restart"]
    assert (event["number"], event["step"], event["code"]) == (1, 5, 137)
    # Every second of the job has a class, from its first process to its last event; so few have
    # none.
    begun, found = (
        float((tmp_path / "once-begun").read_text()),
        goodput(read_run(tmp_path / "killed")),
    )
    assert found is not None
    # Until `train.py` is reached Python itself starts: 30 ms, of a busy machine a second or two.
    assert found.total == pytest.approx(events[-1]["time_seconds"] - begun, rel=0.01, abs=3.0)
    counted = sum(found.parts.values()) - found.parts.get("other", 0.0)
    assert counted == pytest.approx(found.total, rel=0.01, abs=0.15)
    assert found.parts.keys() >= {
        "training",
        "saving",
        "start-up",
        "between restarts",
        "steps taken again",
    }
    assert f"goodput              {found.share:.1%} of " in killed
    assert "rank 1: killed by SIGKILL" in event["cause"]


@pytest.mark.slow
@pytest.mark.timing
def test_a_stop_that_a_rank_alone_heard_is_one_for_all(warm: WarmRanks, tmp_path: Path) -> None:
    code, stated = launched(warm, write_config(tmp_path, "asked", {"step": 8, "asks": True}))
    assert code == 137, stated
    assert "[restart]" not in stated
    assert "rank 1: killed by SIGKILL" in (last := stated.splitlines()[-1])
    assert re.search(
        r"; a stop was asked for \(SIGTERM to rank 0 at node 0 \(.*\)\) \[stop-asked\]$", last
    )


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.exhaustive  # what is decided is tried above
def test_an_error_that_comes_again_is_not_tried_for_ever(warm: WarmRanks, tmp_path: Path) -> None:
    code, stated = launched(
        warm, write_config(tmp_path, "again", {"step": 8, "error": "no such sample"})
    )
    assert code == 77, stated
    assert stated.count("[restart]") == 2, "from step 5, and once more"
    assert "the same error at the same step again" in stated
    assert "no such sample" in stated
