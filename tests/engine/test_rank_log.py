"""A rank's log on storage that stalls: the rank goes on, and every line is there in the end."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.engine.distributed import open_rank_log
from framework.errors import RunStopped, StorageError, TrainingError
from framework.system import file_writer
from framework.system import log as rank_log
from tests.blocked import StalledFile
from tests.launched import ROOT
from tests.until import until
from tests.warm_ranks import session_ranks


@pytest.fixture(autouse=True)
def _writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs start a writer of this test: of others, files are complete as soon as they are
    written.
    """
    monkeypatch.setattr(file_writer, "_WRITER", file_writer._Writer())


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[logging.FileHandler]:
    deepspeed = logging.getLogger("DeepSpeed")
    before, level = list(deepspeed.handlers), deepspeed.level
    open_rank_log(tmp_path / "logs" / "rank0.log")
    (found,) = (each for each in deepspeed.handlers if isinstance(each, logging.FileHandler))
    yield found
    rank_log.stop_logging_to_file()
    deepspeed.handlers[:] = before
    deepspeed.setLevel(level)


def lines(text: str) -> list[str]:
    """Level, logger and text, without the time."""
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in text.splitlines()
    )
    return [line.split(" ", 2)[2] for line in text.splitlines()]


def test_lines_are_in_the_file_when_logging_returns(
    handler: logging.FileHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a kill loses them."""
    monkeypatch.setattr(file_writer, "_MOMENT_SECONDS", 30.0)  # a busy machine is no stall
    for number in range(50):
        rank_log.note("step %s \u00e9 \udcff", number)
        written = Path(handler.baseFilename).read_bytes().splitlines()
        assert len(written) == number + 1
        assert written[-1].endswith(f"INFO dsf-trainer: step {number} \u00e9 \\udcff".encode())


def test_a_log_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match=r"\[log-not-opened\]"):
        open_rank_log(tmp_path / "runs" / "lost" / "logs" / "rank0.log")


@pytest.mark.parametrize(
    ("level", "kept"), [("warning", ["bad"]), ("debug", ["dull", "usual", "bad"]), ("none", None)]
)
def test_a_level_keeps_chatter_out(
    level: str, kept: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSF_LOG_LEVEL", level)
    deepspeed = logging.getLogger("DeepSpeed")
    before, least = list(deepspeed.handlers), deepspeed.level
    try:
        open_rank_log(tmp_path / "logs" / "rank0.log")
        for write, text in (
            (deepspeed.debug, "dull"),
            (deepspeed.info, "usual"),
            (deepspeed.warning, "bad"),
        ):
            write(text)
    finally:
        rank_log.stop_logging_to_file()
        deepspeed.handlers[:] = before
        deepspeed.setLevel(least)
    written = (tmp_path / "logs" / "rank0.log").read_text(encoding="utf-8")
    assert [line.rsplit(" ", 1)[1] for line in written.splitlines()] == (
        ["usual", "bad"] if kept is None else kept
    )


@pytest.mark.parametrize(
    "end", [None, TrainingError("diverged [x]"), RunStopped("SIGTERM: saved [stopped]")]
)
def test_storage_that_stalls_holds_up_no_rank_and_loses_no_line(
    handler: logging.FileHandler, end: Exception | None
) -> None:
    stalled, logged = StalledFile(handler.stream), list[str]()
    try:
        with rank_log.logging_the_run():
            started = time.monotonic()
            for number in range(0, 400, 2):
                rank_log.note("step %s", number)
                logging.getLogger("DeepSpeed").info("step %s", number + 1)
                logged += [f"INFO dsf-trainer: step {number}", f"INFO DeepSpeed: step {number + 1}"]
            seconds = time.monotonic() - started
            stalled.resume_in(0.2)
            if end is not None:
                raise end
    except (TrainingError, RunStopped):
        logged.append(f"{'ERROR' if isinstance(end, TrainingError) else 'INFO'} dsf-trainer: {end}")
    assert lines(stalled.text(handler.close)) == logged
    assert seconds < 8.0


@pytest.mark.slow
def test_a_full_queue_waits_for_the_storage(
    handler: logging.FileHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "_LONGEST_QUEUE", 10)
    logged: list[int] = []

    def log() -> None:
        for number in range(1, 30):
            rank_log.note("step %s", number)
            logged.append(number)

    rank = threading.Thread(target=log, daemon=True)
    with StalledFile(handler.stream) as stalled:
        rank_log.note("step 0")
        until(lambda: file_writer._WRITER._writes.empty(), "the first line is being written")
        rank.start()
        until(lambda: len(logged) >= 10, "ten lines are queued")
        rank.join(0.2)
        assert rank.is_alive()
        assert len(logged) == 10
    rank.join(30)
    assert not rank.is_alive()
    assert len(lines(stalled.text(handler.close))) == 30


def test_a_disk_that_is_full_costs_one_warning_and_no_line(
    handler: logging.FileHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    descriptor = handler.stream.fileno()
    disk = os.dup(descriptor)
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), descriptor)
    for number in range(3):
        rank_log.note("kept %s", number)
    file_writer.settle()
    os.dup2(disk, descriptor)
    os.close(disk)
    rank_log.stop_logging_to_file()
    assert capsys.readouterr().err == (
        f"warning: {handler.baseFilename}: No space left on device; what it is to hold is kept, and tried again "
        "[log-not-written]\n"
    )
    written = Path(handler.baseFilename).read_text(encoding="utf-8")
    assert [line for line in lines(written) if "WARNING" not in line][:3] == [
        f"INFO dsf-trainer: kept {number}" for number in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("well", 0), ("error", 1), ("SIGTERM", 75)])
def test_a_run_whose_storage_is_slow_has_all_lines_however_it_ends(
    tmp_path: Path, end: str, code: int
) -> None:
    job = session_ranks().start(
        [end],
        num_ranks=1,
        folder=tmp_path / "ranks",
        script=ROOT / "tests/jobs/slow_log.py",
        cwd=tmp_path,
    )
    assert job.wait(300) == [code], job.stated()
    run = tmp_path / "outputs" / "slow"
    points = [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    rows = [
        int(row.split(",")[0]) for row in (run / "metrics.csv").read_text("utf-8").splitlines()[1:]
    ]
    text = (run / "logs" / "rank0.log").read_text("utf-8")
    steps = [int(number) for number in re.findall(r"dsf-trainer: step (\d+)/40 ", text)]
    assert points == rows == steps == list(range(1, len(steps) + 1))
    assert len(steps) == 40 if end == "well" else len(steps) >= 8
    if end == "error":
        assert "at sample 70" in text.rpartition("dsf-trainer: step ")[2]
    if end == "SIGTERM":
        assert f"{signal.SIGTERM.name}: " in text.splitlines()[-1]
