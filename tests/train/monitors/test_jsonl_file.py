"""One JSON object per point, readable after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from framework.train.monitors.metric_files import JsonlFile
from tests.train.monitors.points import point


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def records(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=refuse)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_point_is_on_disk_as_soon_as_it_is_written(path: Path) -> None:
    monitor = JsonlFile(path, from_step=0)
    monitor.write(point(1, train_loss=0.1 + 0.2))
    monitor.write(point(1, eval_loss=1.0))
    assert records(path) == [
        {"step": 1, "epoch": 0.25, "time": 1_700_000_000.123, "train/loss": 0.1 + 0.2},
        {"step": 1, "epoch": 0.25, "time": 1_700_000_000.123, "eval/loss": 1.0},
    ]
    monitor.close()


def test_values_that_json_does_not_have_are_null(path: Path) -> None:
    monitor = JsonlFile(path, from_step=0)
    monitor.write(point(1, train_loss=math.nan, train_grad=math.inf, train_lr=-math.inf))
    monitor.close()
    (record,) = records(path)
    assert (record["train/loss"], record["train/grad"], record["train/lr"]) == (None, None, None)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(path: Path) -> None:
    first = JsonlFile(path, from_step=0)
    for step in (2, 4, 6):
        first.write(point(step, train_loss=step))
    first.close()
    second = JsonlFile(path, from_step=4)
    second.write(point(6, train_loss=60.0))
    second.close()
    assert [(record["step"], record["train/loss"]) for record in records(path)] == [
        (2, 2.0),
        (4, 4.0),
        (6, 60.0),
    ]


@pytest.mark.parametrize(
    "torn",
    [
        '{"st',
        '{"step": 3, "train/loss": 0.1}',
        '{"step": 3}\x00\n',
        "{}\n",
        '{"step": null}\n',
        "{not json}\n",
        "[1]\n",
        "\n",
        "\x00\x00\x00\n",
        "3\n",
    ],
)
def test_a_line_that_was_not_written_to_the_end_is_dropped(path: Path, torn: str) -> None:
    first = JsonlFile(path, from_step=0)
    first.write(point(2, train_loss=1.0))
    first.close()
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + torn, encoding="utf-8")
    second = JsonlFile(path, from_step=4)
    assert path.read_text(encoding="utf-8") == whole
    second.write(point(5, train_loss=1.0))
    second.close()
    assert [record["step"] for record in records(path)] == [2, 5]
