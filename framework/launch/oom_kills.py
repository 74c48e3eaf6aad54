"""Whether the kernel killed a process of this machine's control group for lack of memory: SIGKILL alone does not
tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


class OomKills:
    """A count of such kills since this was made; none where the kernel's counter cannot be read."""

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        """Read the first of the files that has the counter.

        Args:
            counters: of version 2 (``memory.events``) or 1 (``memory.oom_control``); None: those of this process.
        """
        found = ((path, _read(path)) for path in (_counters() if counters is None else counters))
        first: tuple[Path | None, int] = (None, 0)
        self._path, self._before = next(((path, count) for path, count in found if count is not None), first)

    def have_risen(self) -> bool:
        """Return whether there has been one."""
        now = None if self._path is None else _read(self._path)
        return now is not None and now > self._before


def _counters() -> list[Path]:
    """Inside a container the group is mounted as the root, whatever its name outside."""
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except (OSError, ValueError):
        lines = []
    found = []
    for _, kinds, group in (line for line in lines if len(line) == 3):
        if not kinds:
            found += [_ROOT / group.lstrip("/") / "memory.events", _ROOT / "memory.events"]
        elif "memory" in kinds.split(","):
            memory = _ROOT / "memory"
            found += [memory / group.lstrip("/") / "memory.oom_control", memory / "memory.oom_control"]
    return found


def _read(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None
