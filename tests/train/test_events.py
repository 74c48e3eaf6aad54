"""``events.jsonl``: what happened, over all starts of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from framework.system.log import report_event, warn
from framework.train.events import Events, note_closed
from framework.train.monitors.base import Point


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make(path: Path, *, from_step: int = 0) -> Events:
    return Events(path, from_step=from_step, clock=lambda: 1000.0)


def test_each_event_is_a_line_with_time_step_and_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = make(path := tmp_path / "events.jsonl")
    events("save", 4, seconds=0.25, folder="checkpoints/global_step4")
    events.write(Point(6, 1.0, 0.0, {"train/skipped_steps": 2.0}))
    events.write(Point(7, 1.0, 0.0, {"train/skipped_steps": 2.0}))
    events.write(Point(7, 1.0, 0.0, {"eval/loss": 2.0}))
    warn("a disk is 90 % full [disk]")
    events("end", 8, is_finished=True)
    events.close()
    warn("later [disk]")
    at = {"time_seconds": 1000.0}
    assert read(path) == [
        at | {"step": 0, "kind": "start"},
        at | {"step": 4, "kind": "save", "seconds": 0.25, "folder": "checkpoints/global_step4"},
        at | {"step": 6, "kind": "skip", "count": 2},
        at | {"step": 7, "kind": "warning", "text": "a disk is 90 % full [disk]"},
        at | {"step": 8, "kind": "end", "is_finished": True},
    ]
    assert capsys.readouterr().err.count("warning: ") == 2


def test_a_resumed_run_appends_and_counts_its_starts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = make(path)
    assert first.restarts == 0
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"time_seconds": 1, "step": 3, "kind": "sa')  # a power cut
    resumed = make(path, from_step=3)
    assert resumed.restarts == 1
    resumed.write(Point(5, 1.0, 0.0, {"train/skipped_steps": 7.0}))  # the checkpoint's, from before
    resumed.close()
    again = make(path, from_step=3)
    assert again.restarts == 2
    again.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["kind"] for line in (lines[0], *lines[2:])] == [
        "start",
        "resume",
        "resume",
    ]
    assert lines[1].endswith('"sa')


def test_how_far_the_start_before_had_come_is_noted_before_its_metrics_go(tmp_path: Path) -> None:
    metrics, path = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    metrics.write_text(
        '{"step": 4, "time": 990.0}\n{"step": 6, "time": 991.5, "train/loss": 1.0}\n{"step": 8, "ti'
    )
    Events(path, from_step=4, seconds=2.5, clock=lambda: 1000.0).close()
    note_closed(path, step=9)
    reached, resume, closed = read(path)
    assert reached == {"time_seconds": 991.5, "step": 6, "kind": "reached"}
    assert resume == {"time_seconds": 1000.0, "step": 4, "kind": "resume", "seconds": 2.5}
    assert (closed["kind"], closed["step"]) == ("closed", 9)
    make(path, from_step=6).close()
    assert [event["kind"] for event in read(path)[3:]] == ["resume"], "nothing is taken again"


def test_events_that_others_report(tmp_path: Path) -> None:
    events = make(path := tmp_path / "events.jsonl")
    report_event("hang", step=3, seconds=12.0, phase="a save")
    warn("rank 1 is slow [straggler]", kind="straggler", rank=1)
    events.close()
    report_event("hang", seconds=1.0)
    at = {"time_seconds": 1000.0}
    assert read(path)[1:] == [
        at | {"step": 3, "kind": "hang", "seconds": 12.0, "phase": "a save"},
        at | {"step": 3, "kind": "straggler", "text": "rank 1 is slow [straggler]", "rank": 1},
    ]


def test_going_back_is_no_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    make(path).close()
    Events.append(path, "roll_back", 9, to=4, first=5, last=9)
    going_on = make(path, from_step=4)
    going_on.close()
    again = make(path, from_step=4)
    again.close()
    assert (going_on.restarts, again.restarts) == (0, 1)
    assert [event["kind"] for event in read(path)] == ["start", "roll_back", "resume", "resume"]


def test_a_clock_that_is_set_moves_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year forward or back in the middle; the start names the machine's own clock, which the next
    start has, too.
    """
    events = Events(path := tmp_path / "events.jsonl", from_step=0)
    events("save", 1)
    for jump in (365 * 86_400.0, -365 * 86_400.0):
        really = time.time
        monkeypatch.setattr(time, "time", lambda really=really, jump=jump: really() + jump)
        events("save", 2)
        monkeypatch.undo()
    events.close()
    note_closed(path, step=2)
    start, *others = read(path)
    assert start["boot"]
    assert start["boot_seconds"] > 0
    stamps = [start["time_seconds"], *(event["time_seconds"] for event in others)]
    assert stamps == sorted(stamps)
    assert stamps[-1] - stamps[0] < 60
    assert abs(stamps[0] - time.time()) < 60
