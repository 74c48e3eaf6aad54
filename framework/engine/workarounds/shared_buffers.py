"""Files of 66 MiB per rank that DeepSpeed's shared-memory op makes in /dev/shm and leaves there:
nobody in DeepSpeed up to 0.19.8 calls what unlinks them (csrc/cpu/comm/shm.cpp `shared_close`).
Where they do not fit, it maps what it has not written, and the rank ends by SIGSEGV or SIGBUS.

A run removes its own at its end. What a killed run left is removed at the start of the next one on
that host. A start looks first whether they fit.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from framework.errors import ConfigError, counted

SHARED_MEMORY: Final = Path("/dev/shm")
_NAME: Final = "deepspeed_allreduce_buffer"
# Between the making of a file and the moment at which its ranks have mapped it; then it shows in
# /proc.
_YOUNG_SECONDS: Final = 60.0
# Of a rank: two small buffers and two large ones (csrc/cpu/comm/shm.cpp `struct
# allreduce_workspace`).
_BUFFER_BYTES: Final = 66 << 20
_TO_BE_REMOVED_SECONDS: Final = 2.0


def refuse_small_memory(environment: Mapping[str, str], *, folder: Path = SHARED_MEMORY) -> None:
    """Refuse to start where the buffers of this host's ranks do not fit; before the ranks meet, so
    that none of them has made its own yet.

    Raises:
        ConfigError: kind ``shm-small``.
    """
    world_size = environment.get("WORLD_SIZE", "1")
    # csrc/cpu/comm/shm_interface.cpp asks for no other name
    local_size = environment.get("LOCAL_SIZE", "0")
    if world_size != local_size or not local_size.isdecimal():
        return  # ranks on several hosts, or not counted: the op makes none
    needed = int(local_size) * _BUFFER_BYTES
    deadline = time.monotonic() + _TO_BE_REMOVED_SECONDS
    while (
        free := _free_bytes(folder, own=_own_pattern(environment))
    ) is not None and free < needed:
        if environment.get("LOCAL_RANK", "0") == "0" or time.monotonic() > deadline:
            raise ConfigError.of(
                "shm-small",
                f"{free / 2**20:.0f} MiB are free there, and DeepSpeed takes {needed / 2**20:.0f} "
                f"for {counted(int(local_size), 'rank')} on processors",
                "make it larger (docker run --shm-size=1g; in a pod an emptyDir of medium Memory "
                "mounted there; mount -o remount,size=1g /dev/shm), or start fewer ranks",
                key=str(folder),
            )
        time.sleep(0.1)  # the first rank removes what a killed run left


def _free_bytes(folder: Path, *, own: str) -> int | None:
    """Space in a folder, that of files which this job will write anew included: those of its start
    before.
    """
    try:
        found = os.statvfs(folder)
        taken = sum(path.stat().st_blocks * 512 for path in folder.glob(own))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize + taken


def remove_own_buffers(environment: Mapping[str, str], *, folder: Path = SHARED_MEMORY) -> None:
    """Remove those of this job, when no rank needs them any more."""
    for buffer in folder.glob(_own_pattern(environment)):
        with suppress(OSError):
            buffer.unlink()


def remove_dead_buffers(
    *, folder: Path = SHARED_MEMORY, processes: Path = Path("/proc"), now: float | None = None
) -> list[Path]:
    """Remove this user's buffers that no process has mapped; returns them.

    One that is younger than a minute stays: its ranks may be about to map it. And where one is
    removed that a process out of sight has mapped, in another container, that process keeps what it
    mapped.
    """
    latest = (time.time() if now is None else now) - _YOUNG_SECONDS
    old = [
        path for path in folder.glob(f"{_NAME}_{os.getuid()}_*") if _is_ours_and_older(path, latest)
    ]
    if old:
        mapped = _mapped(processes)
    else:
        mapped = set()
    removed = []
    for path in old:
        if str(path) not in mapped:
            with suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _own_pattern(environment: Mapping[str, str]) -> str:
    address = environment.get("MASTER_ADDR", "")
    port = environment.get("MASTER_PORT", "")
    return f"{_NAME}_{os.getuid()}_{address}_{port}_*"


def _is_ours_and_older(path: Path, latest: float) -> bool:
    with suppress(OSError):
        facts = path.lstat()
        return (
            stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and facts.st_mtime < latest
        )
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
