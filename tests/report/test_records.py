"""Run folders that are old, killed, half written or hostile are read as far as they can be."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError
from framework.report import records, series
from framework.report.figures import best, headline, state
from framework.report.goodput import goodput
from framework.report.records import RunRecords, flat, read_run
from tests.report.made_runs import START, point, points, write_run


def read(folder: Path, text: str) -> RunRecords:
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
    odd = (
        '{"step": true}',
        '{"step": -1}',
        '{"step": 1e400}',
        '{"step": "1"}',
        "[1]",
        "nonsense",
        "[" * 100_000,
        "\0",
    )
    text = (
        good
        + "".join(line + "\n" for line in odd)
        + good.replace('"step": 1', '"step": 2')
        + good[:20]
    )
    run = read(tmp_path / "run", text)
    assert run.metrics["train/loss"].steps == [1, 2]
    assert "metrics.jsonl: its last line was cut off and is left out" in run.notes
    assert "metrics.jsonl: 8 of 10 lines are damaged and left out" in run.notes
    assert {"config.yaml is missing", "plan.json is missing", "environment.json is missing"} <= set(
        run.notes
    )


def test_a_value_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    lines = '{"step": 1, "a/b": null}\n{"step": 2, "a/b": NaN}\n{"step": 3, "a/b": 1e999}\n{"step": 4, "a/b": "x"}\n'
    huge = json.dumps({"step": 5, "a/b": 10**400}) + "\n"
    series = read(tmp_path / "run", lines + huge).metrics["a/b"]
    assert series.steps == [1, 2, 3, 5]
    assert all(map(math.isnan, series.values))
    assert series.finite == []


def test_steps_that_fall_are_put_in_order(tmp_path: Path) -> None:
    run = read(
        tmp_path / "run", "".join(f'{{"step": {step}, "a/b": {step}}}\n' for step in (5, 1, 3))
    )
    assert (run.metrics["a/b"].steps, run.metrics["a/b"].values) == ([1, 3, 5], [1.0, 3.0, 5.0])


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "config.yaml", "plan.json", "environment.json"]
)
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
        path.write_bytes(
            {"empty": b"", "binary": bytes(range(256)), "large": b"a: [" * 1_500_000}[kind]
        )
    run = read_run(folder)
    assert run.name == "run"
    if name != "events.jsonl" or kind not in ("missing", "empty"):
        assert (name == "metrics.jsonl" and kind == "empty") or any(
            note.startswith(name) for note in run.notes
        )


@pytest.mark.slow
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
    """The disk was full from step 11 on: the events know better, and where they end as well the
    checkpoints.
    """
    events: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start"},
        {"time_seconds": START + 50, "step": 90, "kind": "save"},
        # what came after it was taken again
        {"time_seconds": START + 60, "step": 20, "kind": "resume"},
        {"time_seconds": START + 70, "step": 60, "kind": "evaluate", "seconds": 1.0},
    ]
    run = read_run(folder := write_run(tmp_path / "run", lines=points(range(1, 12)), events=events))
    assert (run.last_logged_step, run.last_step) == (11, 60)
    assert state(run) == "reached 60 of 100 steps; it trains, or was ended from outside"
    assert dict(headline(run)["Time"])["steps"] == "60 of 100"
    assert (
        "metrics.jsonl ends with step 11; by its events and checkpoints the run came to step 60"
        in run.notes
    )
    (folder / "checkpoints/global_step70").mkdir(parents=True)
    assert read_run(folder).last_step == 70
    events.append({"time_seconds": START + 80, "step": 100, "kind": "end", "is_finished": True})
    run = read_run(write_run(tmp_path / "ended", lines=points(range(1, 12)), events=events))
    assert state(run) == "finished after 100 steps"
    assert not [
        note for note in read_run(write_run(tmp_path / "whole")).notes if "ends with" in note
    ]


def test_a_long_run_is_read_in_memory_that_does_not_grow_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "MOST_POINTS", 50)
    whole = read_run(write_run(tmp_path / "whole", lines=points(range(1, 60)), events=None))
    folder = write_run(tmp_path / "run", lines=points(range(1, 5_001)), events=None)
    run = read_run(folder)
    assert not [note for note in whole.notes if "drawn as" in note]
    assert max(len(each.steps) for each in (run.clock, run.epochs, *run.metrics.values())) <= 100
    assert any(
        note.startswith("metrics.jsonl has 5,200 points, which are drawn as ") for note in run.notes
    )
    assert run.last_step == 5_000
    # 100 ms a step, 4 ms of them waiting: nothing of the sums is lost.
    found = goodput(run)
    assert found is not None
    assert found.parts == pytest.approx({"training": 480.0, "waiting for data": 20.0}, abs=0.7)
    assert best("eval/accuracy", run.metrics["eval/accuracy"])[0] == 5_000


def test_what_has_grown_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half lines wait for their ends; a file that was replaced or cut is read from its begin."""
    num_parsed = 0
    add = records._add_point

    def count(run: RunRecords, line: bytes) -> bool:
        nonlocal num_parsed
        num_parsed += 1
        return add(run, line)

    monkeypatch.setattr(records, "_add_point", count)
    folder = write_run(tmp_path / "run", lines=points(range(1, 101)))
    metrics, events = folder / "metrics.jsonl", folder / "events.jsonl"
    run = read_run(folder)
    assert num_parsed == 104
    lines = [json.dumps(point(step, train__loss=float(step))) for step in (101, 102, 103)]
    with metrics.open("a") as file:
        file.write(f"{lines[0]}\n{lines[1]}\n{lines[2][:9]}")
    with events.open("a") as file:
        file.write(json.dumps({"kind": "save", "step": 102, "time_seconds": START}) + "\n")
    run = read_run(folder, before=run)
    assert (num_parsed, run.last_step, len(run.events)) == (106, 102, 5)
    assert "metrics.jsonl: its last line was cut off and is left out" in run.notes
    with metrics.open("a") as file:
        file.write(f"{lines[2][9:]}\n")
    run = read_run(folder, before=run)
    assert (num_parsed, run.last_step) == (107, 103)
    assert run.metrics["train/loss"].steps == read_run(folder).metrics["train/loss"].steps
    num_parsed = 0
    metrics.write_text("".join(f"{json.dumps(each)}\n" for each in points(range(1, 11))))
    run = read_run(folder, before=run)
    assert (num_parsed, run.last_logged_step) == (10, 10)
    (tmp_path / "other").write_text(f"{lines[0]}\n" * 20)
    (tmp_path / "other").rename(metrics)
    assert read_run(folder, before=run).clock.steps == [101] * 20
    metrics.unlink()
    run = read_run(folder, before=run)
    assert run.clock.steps == []
    assert "metrics.jsonl is missing" in run.notes


def test_a_line_that_is_too_long_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_LONGEST_LINE", 1000)
    folder = write_run(tmp_path / "run", lines=points(range(1, 4)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "x": "." * 5000}) + "\n")
        file.write(json.dumps(point(5, train__loss=1.0)) + "\n")
        file.write("." * 3000)
    run = read_run(folder)
    assert run.clock.steps == [1, 2, 3, 5]
    assert "metrics.jsonl: 1 of 5 lines are damaged and left out" in run.notes
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(point(6, train__loss=1.0)) + "\n")
    assert read_run(folder, before=run).clock.steps == [1, 2, 3, 5, 6]


def test_more_metrics_than_are_kept(tmp_path: Path) -> None:
    lines = [
        {"step": step, **{f"m{step}/{number}": 1.0 for number in range(100)}}
        for step in range(1, 201)
    ]
    run = read_run(write_run(tmp_path / "run", lines=lines))
    assert len(run.metrics) == 400
    assert "metrics.jsonl: the first 400 of more than 10400 metrics are shown" in run.notes
