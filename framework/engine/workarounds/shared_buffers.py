"""DeepSpeed's shared-memory op (csrc/cpu/comm/shm.cpp) leaves a file of 66 MiB per rank behind in /dev/shm.

A run removes its own at its end. What a killed run left is removed at the start of the next one on that host.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
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
        with contextlib.suppress(OSError):
            buffer.unlink()


def remove_dead_buffers(
    *, folder: Path = SHARED_MEMORY, processes: Path = Path("/proc"), now: float | None = None
) -> list[Path]:
    """Remove this user's buffers that no process has mapped; returns them.

    One that is younger than a minute stays: its ranks may be about to map it. And where one is removed that a process
    out of sight has mapped, in another container, that process keeps what it mapped.
    """
    moment = time.time() if now is None else now
    old = [path for path in folder.glob(f"{_NAME}_{os.getuid()}_*") if _is_ours_and_old(path, moment)]
    mapped = _mapped(processes) if old else set()
    removed = []
    for path in old:
        if str(path) not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _is_ours_and_old(path: Path, moment: float) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return (
        path.is_file()
        and not path.is_symlink()
        and facts.st_uid == os.getuid()
        and moment - facts.st_mtime > _YOUNG_SECONDS
    )


def _mapped(processes: Path) -> set[str]:
    """Paths of the buffers that a process on this host has mapped; those of other users cannot be seen, nor are they
    ours.
    """
    found: set[str] = set()
    for process in processes.iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                for line in (process / "maps").read_text(errors="replace").splitlines():
                    if _NAME in line:
                        found.add(line.split(maxsplit=5)[5])
    return found
