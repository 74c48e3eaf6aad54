"""`doctor --nvme FOLDER` prints a section of a run config, or why the drive was not measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from framework.config.load import config_from_values
from framework.launch import drive_check
from framework.launch.drive_check import drive_check as check
from tests.until import until

AIO = {
    "block_size": 8388608,
    "queue_depth": 32,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 2,
}


def answer_with(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let this program measure."""
    monkeypatch.setattr(drive_check, "_command", lambda _: [sys.executable, "-S", "-c", program])


def test_what_is_printed_goes_into_a_run_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"aio": AIO, "read": 6.5e9, "write": 3.21e9}
    usual = {"aio": {}, "read": 2e9, "write": 1e9}
    line = json.dumps({"best": best, "usual": usual})
    answer_with(monkeypatch, f"print('Using /cache'); print({line!r})")
    found = check(str(tmp_path))
    assert found.status == "ok"
    assert (
        "reads 6.50 GB/s, writes 3.21 GB/s; with DeepSpeed's defaults reads 2.00" in found.outcome
    )
    section = found.outcome.partition("In the run config: ")[2]
    values = yaml.safe_load(section)
    assert values == {"deepspeed": {"aio": AIO}}
    assert config_from_values(values).deepspeed == {"aio": AIO}


def test_a_child_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "raise RuntimeError('Unable to JIT load the async_io op')")
    (problem,) = check(str(tmp_path)).problems
    assert problem.kind == "drive-not-measured"
    assert "Unable to JIT load the async_io op" in problem.reason
    assert "libaio" in problem.fix


def test_a_compiler_ends_with_the_child_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "compiler"
    program = f"""
import os, subprocess, sys, time
print("compiling async_io", file=sys.stderr, flush=True)
with open("{out}.new", "w") as file:
    file.write(str(subprocess.Popen(["sleep", "600"]).pid))
os.rename("{out}.new", {str(out)!r})
time.sleep(600)
"""

    class Compiling(subprocess.Popen[str]):
        """A child whose time begins with that of its compiler, however late a busy machine starts
        it.
        """

        def communicate(
            self, input: str | None = None, timeout: float | None = None
        ) -> tuple[str, str]:
            until(out.exists)
            return super().communicate(input, timeout)

    answer_with(monkeypatch, program)
    monkeypatch.setattr(drive_check, "_LONGEST_SECONDS", 0.1)
    monkeypatch.setattr(subprocess, "Popen", Compiling)
    (problem,) = check(str(tmp_path)).problems
    assert problem.reason.endswith("and was ended; its last message: compiling async_io")
    number = int(out.read_text())
    until(lambda: has_ended(number))


def has_ended(number: int) -> bool:
    """Whether a process is gone, or waits for nothing but to be counted."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    return True


def test_ctrl_c_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = []

    class Interrupted(subprocess.Popen[str]):
        def communicate(self, *_: Any, **__: Any) -> tuple[str, str]:
            children.append(self)
            raise KeyboardInterrupt

    answer_with(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr("subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(str(tmp_path))
    assert children[0].wait(timeout=60) == -signal.SIGKILL


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (problem,) = check(str(tmp_path / "drive")).problems
    assert problem.reason == "there is no such folder"
