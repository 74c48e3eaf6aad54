"""Run folders that are old, killed, half written or hostile are read as far as they can be."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError
from framework.report.figures import headline, state
from framework.report.records import Run, flat, read_run
from tests.report.made_runs import START, point, points, write_run


def read(folder: Path, text: str) -> Run:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(text)
    return read_run(folder)


def test_a_whole_folder_leaves_nothing_to_note(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.notes == []
    assert run.metrics["train/loss"].steps == list(range(5, 101, 5))
    assert run.saved_steps == [50, 100]
    assert [event["kind"] for event in run.events] == ["start", "save", "warning", "end"]
    assert run.warnings == ["loaders stall [stalls]"]
    assert flat(run.config)["optimizer.lr"] == 1e-3


def test_metrics_may_stand_in_a_mapping_of_their_own(tmp_path: Path) -> None:
    run = read(tmp_path / "run", '{"step": 3, "time_seconds": 9, "metrics": {"train/loss": 2}}\n')
    assert (run.metrics["train/loss"].values, run.clock.values) == ([2.0], [9.0])


def test_what_is_damaged_is_left_out_and_noted(tmp_path: Path) -> None:
    good = json.dumps(point(1, train__loss=1.0)) + "\n"
    odd = ('{"step": true}', '{"step": -1}', '{"step": 1e400}', '{"step": "1"}', "[1]", "nonsense", "[" * 100_000, "\0")
    text = good + "".join(line + "\n" for line in odd) + good.replace('"step": 1', '"step": 2') + good[:20]
    run = read(tmp_path / "run", text)
    assert run.metrics["train/loss"].steps == [1, 2]
    assert "metrics.jsonl: its last line was cut off and is left out" in run.notes
    assert "metrics.jsonl: 8 of 10 lines are damaged and left out" in run.notes
    assert {"config.yaml is missing", "plan.json is missing", "environment.json is missing"} <= set(run.notes)


def test_a_value_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    lines = '{"step": 1, "a/b": null}\n{"step": 2, "a/b": NaN}\n{"step": 3, "a/b": 1e999}\n{"step": 4, "a/b": "x"}\n'
    huge = json.dumps({"step": 5, "a/b": 10**400}) + "\n"
    series = read(tmp_path / "run", lines + huge).metrics["a/b"]
    assert series.steps == [1, 2, 3, 5]
    assert all(map(math.isnan, series.values))
    assert series.finite == []


def test_steps_that_fall_are_put_in_order(tmp_path: Path) -> None:
    run = read(tmp_path / "run", "".join(f'{{"step": {step}, "a/b": {step}}}\n' for step in (5, 1, 3)))
    assert (run.metrics["a/b"].steps, run.metrics["a/b"].values) == ([1, 3, 5], [1.0, 3.0, 5.0])


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.yaml", "plan.json", "environment.json"])
@pytest.mark.parametrize("kind", ["missing", "empty", "binary", "link", "pipe", "folder", "large"])
def test_every_file_may_be_anything(name: str, kind: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / name
    path.unlink()
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"empty": b"", "binary": bytes(range(256)), "large": b"a: [" * 1_500_000}[kind])
    run = read_run(folder)
    assert run.name == "run"
    if name != "events.jsonl" or kind not in ("missing", "empty"):
        assert (name == "metrics.jsonl" and kind == "empty") or any(note.startswith(name) for note in run.notes)


def test_aliases_of_yaml_do_not_grow(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    levels = "".join(f"l{n}: &l{n} [{', '.join(['*l' + str(n - 1)] * 9)}]\n" for n in range(1, 12))
    (folder / "config.yaml").write_text("l0: &l0 [x]\n" + levels)
    assert len(flat(read_run(folder).config)) <= 2_000


def test_long_runs_may_be_read_in_part(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=points(range(1, 1001)))
    whole, part = read_run(folder), read_run(folder, most_points=100)
    assert len(part.metrics["train/loss"].steps) < 150
    assert part.metrics["eval/loss"].steps == whole.metrics["eval/loss"].steps
    assert part.last_step == 1000
    assert "one of 11 was read" in part.notes[0]


@pytest.mark.parametrize("kind", ["nowhere", "empty", "file"])
def test_what_is_no_run_is_refused(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    elif kind == "file":
        place.write_text("x")
    with pytest.raises(ConfigError) as caught:
        read_run(place)
    assert str(caught.value).startswith(f"{place}: ")
    assert caught.value.problems[0].kind == ("not-a-run" if kind == "empty" else "run-not-found")
    assert caught.value.problems[0].fix


def test_how_far_a_run_came_is_not_read_from_its_metrics_alone(tmp_path: Path) -> None:
    """The disk was full from step 11 on: the events know better, and where they end as well the checkpoints."""
    events: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start"},
        {"time_seconds": START + 50, "step": 90, "kind": "save"},
        {"time_seconds": START + 60, "step": 20, "kind": "resume"},  # what came after it was taken again
        {"time_seconds": START + 70, "step": 60, "kind": "evaluate", "seconds": 1.0},
    ]
    run = read_run(folder := write_run(tmp_path / "run", lines=points(range(1, 12)), events=events))
    assert (run.last_logged_step, run.last_step) == (11, 60)
    assert state(run) == "reached 60 of 100 steps; it trains, or was ended from outside"
    assert dict(headline(run))["steps"] == "60 of 100"
    assert "metrics.jsonl ends with step 11; by its events and checkpoints the run came to step 60" in run.notes
    (folder / "checkpoints/global_step70").mkdir(parents=True)
    assert read_run(folder).last_step == 70
    events.append({"time_seconds": START + 80, "step": 100, "kind": "end", "is_finished": True})
    run = read_run(write_run(tmp_path / "ended", lines=points(range(1, 12)), events=events))
    assert state(run) == "finished after 100 steps"
    assert not [note for note in read_run(write_run(tmp_path / "whole")).notes if "ends with" in note]
