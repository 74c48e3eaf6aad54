"""Limits of this host, or of the container that this process runs in: free memory, and open
files.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.errors import ConfigError

_KIB: Final = 1024
# Larger than any machine: version 1 writes "no limit" as the largest number of pages.
_NO_LIMIT: Final = 1 << 60
# What other ranks, data loaders and the system may take between the look and the taking.
_MARGIN_BYTES: Final = 1 << 30
_MARGIN_SHARE: Final = 0.05
# Files with the limit and the usage of a group, and what its statistics put before their names.
_VERSION_2: Final = ("memory.max", "memory.current", "")
_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@dataclass(frozen=True)
class Room:
    """Memory that can be taken: how much, after a margin for others, and whose limit that is, in
    words.
    """

    num_bytes: int
    limit: str


def room(*, system: Path = Path("/")) -> Room | None:
    """The tightest of the host's memory and the limits of the control groups around this process;
    None where nobody tells. Pages that the kernel can drop (what it keeps of files) count as room.
    """
    found = [*_of_host(system / "proc/meminfo"), *_of_groups(system)]
    rooms = [
        Room(free - min(_MARGIN_BYTES, int(total * _MARGIN_SHARE)), limit)
        for free, total, limit in found
    ]
    return min(rooms, key=lambda one: one.num_bytes, default=None)


def _of_host(meminfo: Path) -> Iterator[tuple[int, int, str]]:
    try:
        lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
        values = {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) > 1}
        yield values["MemAvailable"], values["MemTotal"], "this host's memory"
    except (OSError, ValueError, LookupError):
        return


def memory_groups(system: Path = Path("/")) -> Iterator[tuple[Path, str, bool]]:
    """The control groups of this process that count memory: root of their tree, name in it, whether
    of version 2. That has one line without controllers; version 1 one that names `memory`.
    """
    try:
        lines = [
            line.split(":", 2)
            for line in (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, ValueError):
        return
    for _, controllers, group in (line for line in lines if len(line) == 3):
        if not controllers or "memory" in controllers.split(","):
            yield (
                system / "sys/fs/cgroup" / ("memory" if controllers else ""),
                group.lstrip("/"),
                not controllers,
            )


def _of_groups(system: Path) -> Iterator[tuple[int, int, str]]:
    """All groups above one limit it too; in a container, where a host's name is not there, the root
    is its own.
    """
    for root, group, is_unified in memory_groups(system):
        for folder in (root / group, *(root / group).parents):
            if folder.is_relative_to(root):
                yield from _of_group(folder, *(_VERSION_2 if is_unified else _VERSION_1))


def _of_group(folder: Path, limit: str, usage: str, prefix: str) -> Iterator[tuple[int, int, str]]:
    try:
        most, used = (
            (folder / name).read_text(encoding="ascii").strip() for name in (limit, usage)
        )
        stat = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        of_files = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
        if most != "max" and int(most) < _NO_LIMIT:
            yield (
                int(most) - int(used) + of_files,
                int(most),
                f"the container's limit ({int(most) / 1e9:.1f} GB)",
            )
    except (OSError, ValueError):  # the root group has no limit and no file for one
        return


def require(wanted: int, what: str, *, fix: str = "") -> None:
    """See to it that so many files can be open at once; what this process starts has the same
    limit.

    Args:
        what: that needs them, in the plural: ``1000 hosts``.
        fix: what else to do than to raise the limit.

    Raises:
        ConfigError: the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    if hard == resource.RLIM_INFINITY:
        allowed = wanted
    else:
        allowed = min(hard, wanted)
    if allowed > soft:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft < wanted:
        reason = f"{what} take {wanted} open files"
        fix = f"ulimit -n {wanted}, which needs root or limits.conf{fix and f', or {fix}'}"
        raise ConfigError.of("nofile-low", reason, fix, key="ulimit -n", value=soft)
