"""What the terminal shows."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

import pytest

from framework.train.monitors.base import Point
from framework.train.monitors.console import Bar, Lines, make_console
from framework.train.monitors.log_lines import describe
from tests.train.monitors.points import point

FULL = {
    "train/loss": 0.123456,
    "train/lr": 1e-3,
    "train/grad_norm": 12.3456,
    "throughput/samples_per_sec": 12345.6,
    "memory/host_peak_bytes": 1e9,
    "time/step_ms": 5.0,
}


def plain(text: str) -> str:
    """Without what moves a cursor or sets a colour."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_line_shows_what_is_worth_a_glance() -> None:
    assert describe(point(1, **FULL)) == "loss 0.1235  lr 0.001  grad norm 12.3  12,346 samples/s"
    assert describe(point(1, **{"eval/accuracy": 0.98765})) == "eval/accuracy 0.9877"
    assert describe(point(1, **{"train/loss": float("nan")})) == "loss nan"
    text = FULL | {"throughput/tokens_per_sec": 987654.3}
    assert describe(point(1, **text)) == "loss 0.1235  lr 0.001  grad norm 12.3  987,654 tokens/s"


def test_lines_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(200)
    lines.write(point(2, train_loss=1.0))
    lines.write(point(200, train_loss=0.5))
    lines.close()
    assert (
        capsys.readouterr().out
        == "step   2/200  epoch 0.50  loss 1.0000\nstep 200/200  epoch 50.00  loss 0.5000\n"
    )


def test_columns_stand_below_each_other_for_any_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(200)
    for step, scale in enumerate((1.0, 1e-3, 17.0), start=1):
        lines.write(point(step, **{name: value * scale for name, value in FULL.items()}))
    shown = capsys.readouterr().out.splitlines()
    for label in ("loss ", "lr ", "grad norm "):
        assert len({line.index(label) for line in shown}) == 1, shown
    assert len({re.search(r"[\d,]+ samples/s", line).start() for line in shown}) == 1, shown  # type: ignore[union-attr]


def test_lines_show_the_time_left_at_the_pace_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluations and saves count; the first point has no pace yet, and the end needs no estimate."""
    lines = Lines(200)
    for step, seconds, metric in (
        (10, 0.0, "train/loss"),
        (20, 100.0, "train/loss"),
        (20, 140.0, "eval/loss"),
        (40, 300.0, "train/loss"),
        (199, 1990.0, "train/loss"),
        (200, 2000.0, "train/loss"),
    ):
        lines.write(Point(step, step / 4, seconds, {metric: 0.5}))
    shown = [line.partition("loss 0.5000")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["", "  left 0:30:00", "", "  left 0:26:40", "  left 0:00:11", ""]


def test_lines_fit_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = Lines(60)
        for step in (1, 2):
            lines.write(point(step, **FULL, **{"memory/device_peak_bytes": 1e9}))
        shown = capsys.readouterr().out.splitlines()
        assert all(len(line) <= columns and "12,346 samples/s" in line for line in shown)
        assert all(("1.0 GB" in line) == (columns == 140) for line in shown)


def test_memory_of_the_device_is_shown_and_goes_first_where_there_is_no_room() -> None:
    metrics = FULL | {"memory/device_peak_bytes": 12.34e9}
    assert describe(point(1, **metrics)).endswith("12,346 samples/s  12.3 GB")
    assert describe(point(1, **metrics), longest=60).endswith("grad norm 12.3  12,346 samples/s")


@pytest.mark.parametrize("mode", ["auto", "lines"])
def test_without_a_terminal_there_are_lines(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_console(mode, total_steps=3, from_step=0), Lines)  # type: ignore[arg-type]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    bar = make_console("auto", total_steps=3, from_step=0)
    assert isinstance(bar, Bar)
    bar.close()


def test_off_is_nothing() -> None:
    assert make_console("off", total_steps=3, from_step=0) is None


@pytest.mark.parametrize("stream", [None, object()], ids=["closed", "without-isatty"])
def test_what_stands_in_for_stdout_gets_lines(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    assert isinstance(make_console("auto", total_steps=3, from_step=0), Lines)


def test_the_bar_starts_at_the_step_of_the_checkpoint_and_keeps_evaluations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = make_console("bar", total_steps=8, from_step=4)
    assert bar is not None
    bar.write(point(6, train_loss=0.25))
    bar.write(point(6, **{"eval/top[5]": 0.5, "eval/[red]": 0.75}))
    bar.close()
    shown = plain(capsys.readouterr().out)
    assert "step 6  eval/top[5] 0.5000  eval/[red] 0.7500" in shown, (
        "brackets are part of a name, not markup"
    )
    assert "6/8" in shown
    assert "loss 0.2500" in shown


@pytest.mark.parametrize("mode", ["lines", "bar"])
def test_a_closed_terminal_is_no_reason_to_lose_a_run(
    mode: Literal["lines", "bar"], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        console = make_console(mode, total_steps=200, from_step=0)
        assert console is not None
        console.write(point(7, **FULL))
        console.write(point(8, **{"eval/accuracy": 0.5}))
        console.close()


@pytest.mark.parametrize("columns", [80, 100, 160])
@pytest.mark.parametrize("total", [220, 123456])
def test_the_bar_fits_the_terminal(
    columns: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns the total of the steps and the time left were cut off."""
    monkeypatch.setattr("rich._console", None)
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = Bar(total_steps=total, from_step=0)
    metrics = {
        "train/loss": 0.1234,
        "train/lr": 9.87e-4,
        "train/grad_norm": 0.543,
        "throughput/samples_per_sec": 12345.0,
    }
    bar.write(point(120, **metrics))
    with bar._progress.console.capture() as shown:
        bar._progress.console.print(bar._progress.get_renderable())
    bar.close()
    line = plain(shown.get()).rstrip("\n")
    assert len(line) <= columns
    assert re.match(
        rf"step +120/{total} .* (-:--:--|\d+:\d\d:\d\d) +epoch 30\.00  loss 0\.1234 .*12,345 samples/s *$",
        line,
    ), line
    assert "grad norm" in line or columns < 160
