"""The part of `doctor --nvme FOLDER`: a drive's speed, and settings for DeepSpeed to use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.doctor.node.findings import Check
from framework.errors import Problem, in_one_line
from framework.system.json_lines import BadLineError, decode

_LONGEST_SECONDS = 900.0  # a first start compiles DeepSpeed's op for minutes
_GB = 1e9


def drive_check(folder: str) -> Check:
    """Measure a folder on a drive with DeepSpeed's settings, and return the best of them as a
    section of a run config. It takes a minute or two.
    """
    if not Path(folder).is_dir():
        return _failed(folder, "there is no such folder", "name a folder on the drive")
    command = [sys.executable, "-m", "framework.engine.nvme_bench", folder]
    environment = {"DS_ACCELERATOR": "cpu", **os.environ}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_SECONDS,
            check=False,
        )
        answer = decode(done.stdout.strip().rpartition("\n")[2].encode())
        return Check("NVMe", _outcome(folder, answer), facts={"aio": answer["best"]["aio"]})
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = in_one_line(error)
    except (BadLineError, KeyError, TypeError):
        reason = done.stderr.strip().rpartition("\n")[2][-300:] or "it printed nothing"
    fix = "DeepSpeed's async_io needs libaio (apt install libaio-dev), a compiler, and a drive "
    return _failed(folder, reason, f"{fix}that takes direct reads and writes (no tmpfs)")


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
