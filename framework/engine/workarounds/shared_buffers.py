"""Files of 66 MiB per rank that DeepSpeed's shared-memory op leaves in /dev/shm: nobody in DeepSpeed up to
0.19.8 calls what unlinks them (csrc/cpu/comm/shm.cpp `shared_close`).

A run removes its own at its end. What a killed run left is removed at the start of the next one on that host.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_NAME: Final = "deepspeed_allreduce_buffer"
# Between the making of a file and the moment at which its ranks have mapped it; then it shows in /proc.
_YOUNG_SECONDS: Final = 60.0


def remove_own_buffers(environment: Mapping[str, str], *, folder: Path = SHARED_MEMORY) -> None:
    """Remove those of this job, when no rank needs them any more."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    for buffer in folder.glob(f"{_NAME}_{os.getuid()}_{address}_{port}_*"):
        with suppress(OSError):
            buffer.unlink()


def remove_dead_buffers(
    *, folder: Path = SHARED_MEMORY, processes: Path = Path("/proc"), now: float | None = None
) -> list[Path]:
    """Remove this user's buffers that no process has mapped; returns them.

    One that is younger than a minute stays: its ranks may be about to map it. And where one is removed that a process
    out of sight has mapped, in another container, that process keeps what it mapped.
    """
    latest = (time.time() if now is None else now) - _YOUNG_SECONDS
    old = [path for path in folder.glob(f"{_NAME}_{os.getuid()}_*") if _is_ours_and_older(path, latest)]
    mapped = _mapped(processes) if old else set()
    removed = []
    for path in old:
        if str(path) not in mapped:
            with suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _is_ours_and_older(path: Path, latest: float) -> bool:
    with suppress(OSError):
        facts = path.lstat()
        return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and facts.st_mtime < latest
    return False


def _mapped(processes: Path) -> set[str]:
    """Paths of the buffers that a process of this user, who owns them, has mapped."""
    found: set[str] = set()
    for process in processes.iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has just ended, or is another user's
                lines = (process / "maps").read_text(errors="replace").splitlines()
                found |= {line.split(maxsplit=5)[5] for line in lines if _NAME in line}
    return found
