"""Files of metrics and events on a disk that is full for a while: they lack nothing once it is
not.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.system import kept_file
from framework.train.events import Events
from framework.train.monitors.metric_files import CsvFile, JsonlFile
from framework.train.monitors.tensorboard_events import TensorBoardEvents
from tests.full_disks import longest_file, small_disk
from tests.train.monitors.points import point
from tests.train.monitors.test_tensorboard_events import scalars

STEPS = range(1, 61)
NAMES = ("metrics.jsonl", "metrics.csv", "tensorboard", "events.jsonl")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "_AGAIN_SECONDS", 0.0)


def train(folder: Path, *, before_step: Callable[[int], None]) -> None:
    """Write what a run of 60 steps does; a metric is new while the disk is full, and lines are
    always whole.
    """
    events = Events(folder / "events.jsonl", from_step=0)
    jsonl = JsonlFile(folder / "metrics.jsonl", from_step=0)
    table = CsvFile(folder / "metrics.csv", from_step=0)
    board = TensorBoardEvents(folder / "tensorboard", from_step=0)
    monitors: list[Any] = [jsonl, table, board]
    for step in STEPS:
        before_step(step)
        metrics = {"train/loss": 1.0 / step, "train/lr": 0.25}
        if step >= 20:
            metrics["eval/loss"] = 2.0
        for monitor in monitors:
            monitor.write(point(step, **metrics))
            monitor.write(point(step, **{"data/stalls": 0.0}))
        events("save", step, folder="." * 200)
        for name in ("metrics.jsonl", "events.jsonl"):
            assert (folder / name).read_bytes()[-1:] in (b"\n", b"")
    for monitor in [*monitors, events]:
        monitor.close()


def steps_of(folder: Path) -> dict[str, list[int]]:
    """Steps that each file has, each as often as it is there but for rows of one step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        "metrics.jsonl": [line["step"] for line in lines if "train/loss" in line],
        "events.jsonl": [event["step"] for event in events if event["kind"] == "save"],
        "metrics.csv": [int(row["step"]) for row in rows],
        "tensorboard": [step for step, _ in scalars(folder / "tensorboard", "train/loss")],
    }


def warned(printed: str) -> list[str]:
    return [
        line.removeprefix("warning: ")
        for line in printed.splitlines()
        if line.startswith("warning: ")
    ]


@pytest.mark.parametrize("free_bytes", [0, 4096])
def test_what_a_full_disk_refuses_is_written_when_there_is_room(
    tmp_path: Path, free_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:

        def fill_and_free(step: int) -> None:
            if step == 12:
                disk.fill(free_bytes=free_bytes)
            if step == 50:
                disk.free()

        train(disk.folder, before_step=fill_and_free)
        assert steps_of(disk.folder) == {name: [*STEPS] for name in NAMES}
        with (disk.folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["data/stalls"] for row in rows] == ["0.0"] * 60
    kept = "No space left on device; what it is to hold is kept, and tried again [monitor-failed]"
    assert sorted(warned(capsys.readouterr().err)) == sorted(f"{name}: {kept}" for name in NAMES)


def test_what_is_missing_in_the_end_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        train(disk.folder, before_step=lambda step: disk.fill() if step == 12 else None)
        there = steps_of(disk.folder)
    printed = warned(capsys.readouterr().err)
    for name in NAMES:
        assert there[name] == [*range(1, len(there[name]) + 1)], "from the begin on, each once"
        missing = len(there[name]) + 1
        lacks = [line for line in printed if line.startswith(f"{name} lacks step")]
        # Of a step whose first point was taken the second is missing.
        texts = [
            f"{name} lacks steps {first} to 60: No space left on device [monitor-failed]"
            for first in (missing, missing - 1)
        ]
        assert len(lacks) == 1
        assert lacks[0] in texts


def test_files_that_may_grow_no_more_keep_whole_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a right to mount: as under a quota, in the middle of a line."""
    jsonl = JsonlFile(tmp_path / "metrics.jsonl", from_step=0)
    table = CsvFile(tmp_path / "metrics.csv", from_step=0)
    board = TensorBoardEvents(tmp_path / "tensorboard", from_step=0)
    events = Events(tmp_path / "events.jsonl", from_step=0)
    monitors: list[Any] = [jsonl, table, board]

    def write(steps: range) -> None:
        for step in steps:
            for monitor in monitors:
                monitor.write(point(step, train_loss=1.0))
            events("save", step)
            for name in ("metrics.jsonl", "events.jsonl", "metrics.csv"):
                assert (tmp_path / name).read_bytes().endswith(b"\n")

    write(range(1, 10))
    with longest_file(350):
        write(range(10, 50))
    write(range(50, 61))
    for monitor in [*monitors, events]:
        monitor.close()
    assert steps_of(tmp_path) == {name: [*STEPS] for name in NAMES}
    assert {line.split(":")[0] for line in warned(capsys.readouterr().err)} == set(NAMES)


def test_a_long_full_disk_costs_no_more_memory_than_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kept_file.KeptFile(tmp_path / "lines", most_bytes=100)
    file.append(b"first\n", step=1)
    with longest_file(6):
        for step in range(2, 50):
            file.append(f"{step:9}\n".encode(), step=step)
    file.append(b"last\n", step=50)
    file.close()
    # Ten lines of ten bytes, of which the oldest gives way to the last one only once that is
    # written.
    assert (tmp_path / "lines").read_text().split() == ["first", *map(str, range(40, 50)), "last"]
    assert "lines lacks steps 2 to 39: File too large [monitor-failed]" in capsys.readouterr().err


def test_between_attempts_a_moment_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "_AGAIN_SECONDS", 1.0)
    now = [0.0]
    file = kept_file.KeptFile(tmp_path / "lines", clock=lambda: now[0])
    with longest_file(1):
        file.append(b"one\n")
    file.append(b"two\n")
    assert (tmp_path / "lines").read_bytes() == b""
    now[0] = 1.5
    file.append(b"three\n")
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\nthree\n"
    file.close()
