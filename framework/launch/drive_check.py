"""The part of `doctor --nvme FOLDER`: a drive's speed, and settings for DeepSpeed to use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.doctor.node.findings import Check
from framework.errors import Problem
from framework.system.json_lines import BadLineError, decode

_LONGEST_SECONDS = 900.0  # a first start compiles DeepSpeed's op for minutes
_GB = 1e9
_NEEDS = (
    "DeepSpeed's async_io needs libaio (apt install libaio-dev), a compiler, some idle minutes of "
    "it, and a drive that takes direct reads and writes (no tmpfs)"
)


def drive_check(folder: str) -> Check:
    """Measure a folder on a drive with DeepSpeed's settings, and return the best of them as a
    section of a run config. It takes a minute or two.
    """
    if not Path(folder).is_dir():
        return _failed(folder, "there is no such folder", "name a folder on the drive")
    stdout, stderr = _measured(folder)
    try:
        answer = decode(stdout.strip().rpartition("\n")[2].encode())
        return Check("NVMe", _outcome(folder, answer), facts={"aio": answer["best"]["aio"]})
    except (BadLineError, KeyError, TypeError):
        reason = stderr.strip().rpartition("\n")[2][-300:] or "it printed nothing"
    return _failed(folder, reason, _NEEDS)


def _command(folder: str) -> list[str]:
    return [sys.executable, "-m", "framework.engine.nvme_bench", folder]


def _measured(folder: str) -> tuple[str, str]:
    """Return the output of a process that measures, and its errors, its own time-out among them.

    It is the first of a session, so that a compiler that it waits for is ended with it: one that
    goes on alone ends at its first message, without the op, and holds up the next one.
    """
    child = subprocess.Popen(
        _command(folder),
        env={"DS_ACCELERATOR": "cpu", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return child.communicate(timeout=_LONGEST_SECONDS)
    except KeyboardInterrupt:  # a child of another session does not get Ctrl-C
        os.killpg(child.pid, signal.SIGKILL)
        raise
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        stdout, stderr = child.communicate()
        last = stderr.strip().rpartition("\n")[2] or "it printed nothing"
        minutes = f"{_LONGEST_SECONDS / 60:.0f} minutes"
        return (
            stdout,
            f"{stderr}\nit was not done after {minutes}, and was ended; its last message: {last}",
        )


def _outcome(folder: str, answer: Mapping[str, Any]) -> str:
    best = answer["best"]
    section = ", ".join(f"{key}: {_in_yaml(value)}" for key, value in best["aio"].items())
    return (
        f"{folder}: {_speeds(best)}; with DeepSpeed's defaults {_speeds(answer['usual'])}. "
        f"In the run config: deepspeed: {{aio: {{{section}}}}}"
    )


def _in_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _speeds(speed: Mapping[str, Any]) -> str:
    return f"reads {speed['read'] / _GB:.2f} GB/s, writes {speed['write'] / _GB:.2f} GB/s"


def _failed(folder: str, reason: str, fix: str) -> Check:
    problem = Problem("drive-not-measured", reason, fix, key="--nvme", value=folder)
    return Check("NVMe", "not measured", [problem])
