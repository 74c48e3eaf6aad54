"""One whole row per step, for any order of points and any moment of a kill."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.train.monitors import metric_files
from framework.train.monitors.metric_files import CsvFile
from tests.train.monitors.points import point


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def column(path: Path, name: str) -> list[str]:
    return [row[name] for row in rows(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def test_one_row_per_step_and_one_column_per_metric(path: Path) -> None:
    monitor = CsvFile(path, from_step=0)
    monitor.write(point(1, train_loss=0.1 + 0.2))
    monitor.write(point(2, train_loss=2.0, train_lr=1e-3))
    monitor.write(point(3, train_lr=1e-4))
    assert path.read_bytes().decode() == (
        "step,epoch,train/loss,train/lr\r\n1,0.25,0.30000000000000004,\r\n2,0.5,2.0,0.001\r\n3,0.75,,0.0001\r\n"
    )


def test_two_points_of_one_step_are_one_row(path: Path) -> None:
    monitor = CsvFile(path, from_step=0)
    for step in (1, 2, 3):
        monitor.write(point(step, train_loss=step))
        monitor.write(point(step, eval_loss=10 * step))
    assert column(path, "step") == ["1", "2", "3"]
    assert column(path, "train/loss") == ["1.0", "2.0", "3.0"]
    assert column(path, "eval/loss") == ["10.0", "20.0", "30.0"]


def test_a_shorter_value_for_the_same_step_leaves_nothing_of_the_longer_one(path: Path) -> None:
    monitor = CsvFile(path, from_step=0)
    monitor.write(point(1, train_loss=1.23456789))
    monitor.write(point(1, train_loss=2.0))
    monitor.write(point(2, train_loss=3.0))
    assert column(path, "train/loss") == ["2.0", "3.0"]


def test_values_that_are_not_finite_and_names_with_commas(path: Path) -> None:
    CsvFile(path, from_step=0).write(point(1, train_loss=math.nan, **{'eval/a,"b"': -math.inf}))
    assert rows(path) == [{"step": "1", "epoch": "0.25", "train/loss": "nan", 'eval/a,"b"': "-inf"}]


def test_a_resumed_run_drops_what_came_after_its_checkpoint(path: Path) -> None:
    first = CsvFile(path, from_step=0)
    for step in (2, 4, 6):
        first.write(point(step, train_loss=step))
    second = CsvFile(path, from_step=4)
    assert column(path, "step") == ["2", "4"]
    second.write(point(6, train_loss=60.0))
    second.write(point(6, eval_loss=1.0))
    assert column(path, "train/loss") == ["2.0", "4.0", "60.0"]


@pytest.mark.parametrize("keep", range(1, 22))
def test_a_row_torn_anywhere_is_dropped(path: Path, keep: int) -> None:
    """The first digit of step 12 reads as step 1, and half a value reads as a value."""
    first = CsvFile(path, from_step=0)
    first.write(point(10, train_loss=0.5, train_lr=0.125))
    whole = path.read_bytes()
    torn = b"12,3.00,0.6666,0.125\r\n"[:keep]
    path.write_bytes(whole + torn)
    CsvFile(path, from_step=12)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x00" * 40,
        b"garbage\n",
        b"step,epoch\r\n1,0.1,9,9\r\n,\r\n\xff\xfe,1\r\n",
        b"a,b\r\n1,2\r\n",
    ],
)
def test_a_damaged_file_does_not_stop_a_run(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    CsvFile(path, from_step=5).write(point(6, train_loss=1.0))
    assert rows(path) == [{"step": "6", "epoch": "1.5", "train/loss": "1.0"}]


def test_a_file_saved_meanwhile_is_not_damaged(path: Path) -> None:
    monitor = CsvFile(path, from_step=0)
    monitor.write(point(1, train_loss=1.0))
    monitor.write(point(2, train_loss=2.0))
    path.write_text(path.read_text(encoding="utf-8").replace("2.0", "2.000"), encoding="utf-8")
    monitor.write(point(2, train_loss=2.5))
    monitor.write(point(3, train_loss=3.0))
    assert column(path, "train/loss") == ["1.0", "2.5", "3.0"]


def test_a_file_put_in_its_place_goes_on(path: Path) -> None:
    """Of the same size: the rows would go to a file that is never read."""
    monitor = CsvFile(path, from_step=0)
    monitor.write(point(1, train_loss=1.0))
    other = path.with_name("other.csv")
    other.write_bytes(path.read_bytes())
    other.replace(path)
    monitor.write(point(2, train_loss=2.0))
    assert column(path, "train/loss") == ["1.0", "2.0"]


def test_it_is_not_opened_for_every_point(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = CsvFile(path, from_step=0)
    monitor.write(point(1, train_loss=1.0))
    opened: list[Path] = []
    monkeypatch.setattr(
        metric_files, "open_own", lambda path, *_: opened.append(path) or metric_files.io.BytesIO()
    )
    for step in range(2, 9):
        monitor.write(point(step, train_loss=step))
    assert opened == []
    assert column(path, "step") == [str(step) for step in range(1, 9)]


def test_a_file_that_is_gone_is_begun_again(path: Path) -> None:
    monitor = CsvFile(path, from_step=0)
    monitor.write(point(1, train_loss=1.0))
    path.unlink()
    monitor.write(point(2, train_loss=2.0))
    monitor.close()
    assert column(path, "step") == ["2"]


POINTS = st.lists(
    st.dictionaries(
        st.sampled_from(["train/loss", "eval/loss", "a", "b"]), st.floats(-9, 9), min_size=1
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(points=POINTS, repeat=st.sets(st.integers(0, 11)), resume=st.integers(0, 12))
def test_what_is_read_back_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    points: list[dict[str, float]],
    repeat: set[int],
    resume: int,
) -> None:
    path = tmp_path_factory.mktemp("csv") / "metrics.csv"
    expected: dict[int, dict[str, float]] = {}
    monitor = CsvFile(path, from_step=0)
    step = 0
    for number, metrics in enumerate(points):
        step += number not in repeat or number == 0
        if number == resume:
            expected = {old: row for old, row in expected.items() if old <= step - 1}
            monitor = CsvFile(path, from_step=step - 1)
        expected[step] = expected.get(step, {}) | metrics
        monitor.write(point(step, **metrics))
    read = {
        int(row["step"]): {
            name: float(value)
            for name, value in row.items()
            if value and name not in ("step", "epoch")
        }
        for row in rows(path)
    }
    assert read == expected
    assert column(path, "step") == [str(step) for step in sorted(expected)]
