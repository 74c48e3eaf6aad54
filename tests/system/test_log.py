"""A rank's own log: messages go there, too, and why it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest import TestCase

import pytest

from framework.errors import RunStopped, TrainingError
from framework.system import log as rank_log
from framework.system.log import warn
from framework.train.monitors.base import Point
from framework.train.monitors.log_lines import LogLines


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "rank3.log"
    handler = logging.FileHandler(path, encoding="utf-8")
    rank_log.write_to(handler)
    yield path
    rank_log.stop_logging_to_file()
    handler.close()


def lines(log: Path) -> list[str]:
    """Return level and text of each line, without the time."""
    return [line.split(" ", 2)[2] for line in log.read_text().splitlines()]


def test_what_is_reported_and_warned_of_is_also_in_the_log(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_log.print_line("training night")
    rank_log.print_line()
    warn("a disk\nis 90 % full [disk]")
    LogLines(220).write(
        Point(11, 1.0, 0.0, {"train/loss": 0.5, "eval/accuracy": 0.25, "time/step_ms": 1.0})
    )
    assert capsys.readouterr() == ("training night\n\n", "warning: a disk is 90 % full [disk]\n")
    assert lines(log) == [
        "INFO dsf-trainer: training night",
        "WARNING dsf-trainer: a disk is 90 % full [disk]",
        "INFO dsf-trainer: step 11/220  epoch 1.00  loss 0.5000  eval/accuracy 0.2500",
    ]


@pytest.mark.parametrize(("rank", "stated"), [("0", "warning: all of us [x]\n"), ("3", "")])
def test_a_warning_of_all_ranks_is_reported_by_one_and_noted_by_all(
    log: Path,
    rank: str,
    stated: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    warn("all of us [x]", is_of_all_ranks=True)
    assert capsys.readouterr().err == stated
    assert lines(log) == ["WARNING dsf-trainer: all of us [x]"]


def test_why_it_ended_is_in_the_log_and_goes_on_its_way(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log has it on ranks that leave the report to another rank, too."""
    with pytest.raises(ZeroDivisionError), rank_log.logging_the_run():
        _ = 1 / 0
    text = log.read_text()
    assert "ERROR dsf-trainer: Traceback (most recent call last):\n" in text
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "level"),
    [(TrainingError("diverged [x]"), "ERROR"), (RunStopped("SIGTERM [stopped]"), "INFO")],
)
def test_an_end_that_has_a_text_is_one_line(log: Path, error: Exception, level: str) -> None:
    with pytest.raises(type(error)), rank_log.logging_the_run():
        raise error
    assert lines(log) == [f"{level} dsf-trainer: {error}"]


def test_the_next_run_of_a_process_writes_no_more_there(log: Path) -> None:
    with rank_log.logging_the_run():
        rank_log.note("in the run")
    rank_log.note("after it")
    assert lines(log) == ["INFO dsf-trainer: in the run"]


def test_without_a_file_nothing_goes_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    rank_log.note("lost")
    rank_log.note_warning("lost")
    assert capsys.readouterr() == ("", "")


def test_warnings_of_a_library_are_left_out_meanwhile() -> None:
    library = logging.getLogger("library.part")
    with TestCase().assertLogs(library, logging.WARNING) as logs:
        with rank_log.without_warnings_of("library.part"):
            library.warning("registered twice")
            library.error("broken")
        library.warning("after it")
    assert [record.getMessage() for record in logs.records] == ["broken", "after it"]
