"""Time stamps of one process, which corrections of the system's clock do not change."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def seconds_since_boot() -> float:
    """Return the time since this machine was started, the same for all of its processes.

    The time that the machine slept counts, if the system has such a clock.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


_BOOTED_AT: Final = time.time() - seconds_since_boot()


def now() -> float:
    """Return the Unix time, by the system's clock as it was when this process began."""
    return _BOOTED_AT + seconds_since_boot()


def boot() -> str:
    """Return an id of this boot of the machine; empty if the system has none."""
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()[:8]
    return ""
