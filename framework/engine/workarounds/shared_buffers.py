"""Files of 66 MiB per rank that DeepSpeed's shared-memory op makes in /dev/shm and leaves there:
DeepSpeed up to 0.19.8 never calls the function that unlinks them (csrc/cpu/comm/shm.cpp
`shared_close`). If they do not fit, it maps what it has not written, and the rank ends by SIGSEGV
or SIGBUS.

A run removes its own files at its end. Files of a killed run are removed at the start of the next
one on that host. A start checks first whether they fit.
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
# A file is made before its ranks have mapped it; only then does it show in /proc.
_YOUNG_SECONDS: Final = 60.0
# A rank has two small buffers and two large ones (csrc/cpu/comm/shm.cpp `struct
# allreduce_workspace`).
_BUFFER_BYTES: Final = 66 << 20
_TO_BE_REMOVED_SECONDS: Final = 2.0


def refuse_small_memory(environment: Mapping[str, str], *, folder: Path = SHARED_MEMORY) -> None:
    """Refuse to start if the buffers of this host's ranks do not fit. Called before the ranks meet,
    when none of them has made its own yet. Local ranks other than 0 wait up to two seconds for
    space.

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
    while True:
        free = _free_bytes(folder, job_pattern=_job_pattern(environment))
        if free is None or free >= needed:
            return
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


def _free_bytes(folder: Path, *, job_pattern: str) -> int | None:
    """Return the free space in a folder, or None if it cannot be read. Files of an earlier start of
    this job count as free: this one overwrites them.
    """
    try:
        system = os.statvfs(folder)
        overwritten = sum(path.stat().st_blocks * 512 for path in folder.glob(job_pattern))
    except OSError:
        return None
    return system.f_bavail * system.f_frsize + overwritten


def remove_own_buffers(environment: Mapping[str, str], *, folder: Path = SHARED_MEMORY) -> None:
    """Remove the buffers of this job, when no rank needs them any more."""
    for buffer in folder.glob(_job_pattern(environment)):
        with suppress(OSError):
            buffer.unlink()


def remove_dead_buffers(
    *, folder: Path = SHARED_MEMORY, processes: Path = Path("/proc"), now: float | None = None
) -> list[Path]:
    """Remove this user's buffers that no process has mapped, and return their paths.

    A buffer that is younger than a minute stays: its ranks may be about to map it. If a process in
    another container, which is not seen here, has mapped a removed buffer, it keeps its mapping.
    """
    if now is None:
        now = time.time()
    latest = now - _YOUNG_SECONDS
    paths = list(folder.glob(f"{_NAME}_{os.getuid()}_*"))
    paths = [path for path in paths if _is_own_and_older(path, latest)]
    if not paths:
        return []
    mapped = _mapped_buffers(processes)
    removed = []
    for path in paths:
        if str(path) not in mapped:
            with suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _job_pattern(environment: Mapping[str, str]) -> str:
    address = environment.get("MASTER_ADDR", "")
    port = environment.get("MASTER_PORT", "")
    return f"{_NAME}_{os.getuid()}_{address}_{port}_*"


def _is_own_and_older(path: Path, latest: float) -> bool:
    with suppress(OSError):
        status = path.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        return is_own and status.st_mtime < latest
    return False


def _mapped_buffers(processes: Path) -> set[str]:
    """Return the paths of the buffers that processes of this user, who owns them, have mapped."""
    mapped: set[str] = set()
    for process in processes.iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has just ended, or is another user's
                lines = (process / "maps").read_text(errors="replace").splitlines()
                # the sixth column of /proc/PID/maps is the path
                mapped |= {line.split(maxsplit=5)[5] for line in lines if _NAME in line}
    return mapped
