"""Goodput, against figures worked out by hand, and against the ledger of an hour that was simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from framework.report.figures import goodput_line
from framework.report.goodput import goodput
from framework.report.records import read_run
from framework.train.events import carry_over
from tests.campaign.simulated_hour import hour
from tests.report.made_runs import START, points, write_run


def test_goodput_of_a_run_without_events(tmp_path: Path) -> None:
    """20 points of 5 steps of 100 ms: 10 s of steps, of which 4 % wait; clock and steps agree, but for nothing else."""
    found = goodput(read_run(write_run(tmp_path / "run", events=None)))
    assert found is not None
    assert found.parts == {"training": pytest.approx(9.6), "waiting for data": pytest.approx(0.4)}
    assert found.share == pytest.approx(0.96)


def test_goodput_of_a_run_that_was_killed_and_went_on(tmp_path: Path) -> None:
    """Saved at 50, killed after an evaluation at 60, gone 100 s, resumed at 50."""
    events: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start"},
        {"time_seconds": START + 10, "step": 50, "kind": "save", "seconds": 0.5},
        {"time_seconds": START + 11.5, "step": 60, "kind": "evaluate", "seconds": 0.5},
        {"time_seconds": START + 111.5, "step": 50, "kind": "resume"},
        {"time_seconds": START + 120, "step": 100, "kind": "end"},
    ]
    lines = [
        each if each["step"] <= 50 else each | {"time": START + 113.5 + each["step"] / 10}
        for each in points(range(5, 101, 5))
    ]
    found = goodput(read_run(write_run(tmp_path / "run", lines=lines, events=events)))
    assert found is not None
    parts = dict(found.parts)
    assert parts.pop("between restarts") == pytest.approx(100.0)
    assert parts.pop("steps taken again") == pytest.approx(1.5), "with the evaluation, which was worth nothing either"
    assert parts.pop("start-up") == pytest.approx(5.0)
    assert parts.pop("saving") == pytest.approx(0.5)
    assert parts.pop("training") == pytest.approx(9.6)
    assert parts.pop("waiting for data") == pytest.approx(0.4)
    assert parts.pop("ending") == pytest.approx(3.5)
    assert set(parts) == {"other"}
    assert found.total == pytest.approx(123.5)  # to the last point
    assert goodput_line(found) == (
        "7.8% of 2 min 04 s: between restarts 1 min 40 s (1), training 9.6 s, start-up 5 s, ending 3.5 s, other 3 s, "
        "steps taken again 1.5 s"
    )


def test_all_that_events_tell_of(tmp_path: Path) -> None:
    """A process of 2 s begins, evaluates, compiles, hangs, saves, calls back and ends: all but 0.1 s have a name."""
    events: list[dict[str, Any]] = [
        {"time_seconds": START + 2, "step": 0, "kind": "start", "seconds": 2.0},
        {"time_seconds": START + 4, "step": 0, "kind": "evaluate", "seconds": 1.5},
        {"time_seconds": START + 8.2, "step": 1, "kind": "first_step", "seconds": 3.2},
        {"time_seconds": START + 30, "step": 50, "kind": "hang", "seconds": 12.0},
        {"time_seconds": START + 32.2, "step": 100, "kind": "save", "seconds": 1.0},
        {"time_seconds": START + 32.2, "step": 100, "kind": "hang", "seconds": 0.25, "phase": "a save"},
        {"time_seconds": START + 33, "step": 100, "kind": "callbacks", "seconds": 0.7},
        {"time_seconds": START + 33, "step": 100, "kind": "end", "is_finished": True},
        {"time_seconds": START + 37, "step": 100, "kind": "closed"},
    ]
    lines = [each | {"time": START + 5 + 0.26 * each["step"]} for each in points(range(50, 101, 50))]
    for line, milliseconds in zip(lines, (320.0, None, 200.0, None), strict=True):  # two of them are evaluations
        line |= {"time/step_ms": milliseconds, "time/data_ms": 4.0} if milliseconds else {}
    found = goodput(read_run(write_run(tmp_path / "run", lines=lines, events=events)))
    assert found is not None
    assert found.parts == pytest.approx(
        {
            "start-up": 5.0 - 1.5,
            "evaluation": 1.5,
            "compiling": 3.2 - 0.26,
            "hanging": 12.0 + 0.25,
            "training": 26.0 - 0.4 - 12.0 - (3.2 - 0.26),
            "waiting for data": 0.4,
            "saving": 0.75,
            "callbacks": 0.7,
            "ending": 4.0,
            "other": 37.0 - 5.0 - 26.0 - 1.7 - 4.0,
        }
    )


def test_a_run_that_was_stopped_and_resumed_has_not_failed(tmp_path: Path) -> None:
    stop = {"step": 50, "is_finished": False, "kind": "end"}
    events: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start", "seconds": 1.0},
        {"time_seconds": START + 12, **stop},
        {"time_seconds": START + 12.5, "step": 50, "kind": "closed"},
        {"time_seconds": START + 1012.5, "step": 50, "kind": "resume", "seconds": 10.0},
        {"time_seconds": START + 1012.6, "step": 51, "kind": "first_step", "seconds": 0.1},
        {"time_seconds": START + 1018, "step": 100, "kind": "end", "is_finished": True},
    ]
    lines = [
        each if each["step"] <= 50 else each | {"time": START + 1007.5 + each["step"] / 10}
        for each in points(range(5, 101, 5))
    ]
    found = goodput(read_run(write_run(tmp_path / "run", lines=lines, events=events)))
    assert found is not None
    assert found.parts["stopped"] == pytest.approx(990.0)
    assert found.parts["ending"] == pytest.approx(0.5)
    assert found.restarts == 0
    assert found.parts.keys().isdisjoint({"between restarts", "steps taken again"})
    assert found.total == pytest.approx(1019.0)


def test_a_start_that_has_saved_nothing_counts(tmp_path: Path) -> None:
    """Its folder was moved aside, and the job goes on in a new one; another job's is no part of it."""
    first: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start", "seconds": 3.0},
        {"time_seconds": START + 1, "step": 1, "kind": "first_step", "seconds": 0.5},
        {"time_seconds": START + 9, "step": 0, "kind": "restart", "seconds": 12.5},
    ]
    before = write_run(tmp_path / "before", lines=points([5]), events=first)  # the point is of START + 5.5
    after = write_run(tmp_path / "after", events=[])
    carry_over(before, after)
    shift = [each | {"time": each["time"] + 20} for each in points(range(5, 101, 5))]
    (after / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shift))
    with (after / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time_seconds": START + 25, "step": 0, "kind": "start", "seconds": 10.0}) + "\n")
        file.write(json.dumps({"time_seconds": START + 25.1, "step": 1, "kind": "first_step", "seconds": 0.1}) + "\n")
    found = goodput(read_run(after))
    assert found is not None
    assert (found.restarts, found.parts["start-up"]) == (1, pytest.approx(3.5 + 10.0))
    assert found.parts["steps taken again"] == pytest.approx(5.0)
    assert found.parts["between restarts"] == pytest.approx(9.5)
    assert found.total == pytest.approx(38.0)
    (before / "events.jsonl").write_text(json.dumps(first[0]) + "\n")
    carry_over(before, other := write_run(tmp_path / "other", events=[]))
    assert (other / "events.jsonl").read_text() == ""


def test_an_hour_of_failures_every_two_minutes(tmp_path: Path) -> None:
    found, job = hour(tmp_path, every_seconds=4.9, save_seconds=0.1)
    parts, spent = found.parts, job.ledger
    assert found.restarts == 29
    assert found.share >= 0.9
    assert found.total == pytest.approx(3600.0, rel=0.01)
    assert parts["training"] + parts["compiling"] == pytest.approx(spent["kept"], abs=0.01 * 3600)
    assert parts["steps taken again"] == pytest.approx(spent["lost"], rel=0.02)
    assert parts["saving"] == pytest.approx(spent["saving"], rel=0.02)
    assert parts["start-up"] + parts["between restarts"] == pytest.approx(spent["down"], rel=0.02)
    assert parts.get("other", 0.0) < 0.001 * found.total
