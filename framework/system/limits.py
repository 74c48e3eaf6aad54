"""Limits of memory: of this host, or of the container of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_KIB: Final = 1024
# Larger than any machine: version 1 writes "no limit" as the largest number of pages.
_NO_LIMIT: Final = 1 << 60
# Memory that other ranks, data loaders and the system may take before this process takes its own.
_MARGIN_BYTES: Final = 1 << 30
_MARGIN_SHARE: Final = 0.05
# Files with the limit and the usage of a group, and the prefix of names in its statistics.
_VERSION_2: Final = ("memory.max", "memory.current", "")
_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def ranks_on_host() -> int:
    """Return the number of ranks on this host, by torchrun's or DeepSpeed's variable; the plan of
    the run has checked it.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


@dataclass(frozen=True)
class Room:
    """Memory that can be taken, after a margin for others, and the name of its limit."""

    num_bytes: int
    limit: str


def room(*, system: Path = Path("/")) -> Room | None:
    """Return the smallest room: the host's memory, or that of a control group of this process.

    Pages of files, which the kernel can drop, count as room. It is None if no limit can be read.
    """
    limits = list(_of_host(system / "proc/meminfo"))
    limits += _of_groups(system)
    rooms = []
    for free, total, name in limits:
        margin = min(_MARGIN_BYTES, int(total * _MARGIN_SHARE))
        rooms.append(Room(free - margin, name))
    return min(rooms, key=lambda room: room.num_bytes, default=None)


def _of_host(meminfo: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the free and the total bytes, and the name of the limit."""
    values: dict[str, int] = {}
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            words = line.split()
            if len(words) > 1:
                values[words[0].rstrip(":")] = int(words[1]) * _KIB
        yield values["MemAvailable"], values["MemTotal"], "this host's memory"
    except (OSError, ValueError, LookupError):
        return


def control_groups(
    controller: str, *, system: Path = Path("/")
) -> Iterator[tuple[Path, str, bool]]:
    """Yield the control groups of this process that limit what `controller` names.

    Each is the root of its tree, its name in the tree, and whether it is of version 2. A line of
    version 2 has no controllers; a line of version 1 counts if it names this one.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) < 3:
            continue
        _, controllers, group = parts
        root = system / "sys/fs/cgroup"
        if not controllers:
            yield root, group.lstrip("/"), True
        elif controller in controllers.split(","):
            yield root / controller, group.lstrip("/"), False


def _of_groups(system: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the free and the total bytes, and the name of the limit, of each group of this process
    and each group above it.

    In a container, where the host's name of a group does not exist, the root is the container's.
    """
    for root, group, is_unified in control_groups("memory", system=system):
        limit, usage, prefix = _VERSION_2 if is_unified else _VERSION_1
        for folder in (root / group, *(root / group).parents):
            if folder.is_relative_to(root):
                yield from _of_group(folder, limit, usage, prefix)


def _of_group(folder: Path, limit: str, usage: str, prefix: str) -> Iterator[tuple[int, int, str]]:
    """Yield the free and the total bytes of a group, and the name of the limit."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii").strip())
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        stat = dict(line.split() for line in lines)
        of_files = int(stat.get(f"{prefix}inactive_file", 0))
        of_files += int(stat.get(f"{prefix}active_file", 0))
        if most != "max" and int(most) < _NO_LIMIT:
            total = int(most)
            yield total - used + of_files, total, f"the container's limit ({total / 1e9:.1f} GB)"
    except (OSError, ValueError):  # the root group has no limit and no file for one
        return


def host_memory_bytes(*, system: Path = Path("/")) -> int:
    """Return the memory of this machine, or of the smallest control group of this process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total for _, total, _ in _of_groups(system)]
    return min([memory, *limits])
