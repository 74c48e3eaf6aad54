"""Choice of a port for ranks, seconds before a rank listens there. Standard library only."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

# Linux takes a port of this range for a program that wants any port, and for every connection.
_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LARGEST: Final = 65_535
_TRIES: Final = 64
_ENOUGH: Final = 2000  # of fewer, jobs that start at the same moment would take the same


def free_port() -> int:
    """Return a port at which no program listens, on any address of this machine.

    If possible, it is a port that the kernel does not hand out by itself, so that no other program
    gets it in the seconds until a rank listens there.
    """
    outside = range(_last_given() + 1, _LARGEST)  # not _LARGEST: an agent uses the port after
    if len(outside) >= _ENOUGH:
        for port in random.SystemRandom().sample(outside, _TRIES):
            with suppress(OSError):
                return _bound(port)
    return _bound(0)


def _last_given() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(_GIVEN.read_text(encoding="ascii").split()[1])
    return _LARGEST


def _bound(port: int) -> int:
    """Bind to a port for a moment, and return it; 0: any port. Raises OSError if it is taken."""
    with socket.socket() as probe:
        probe.bind(("", port))
        number: int = probe.getsockname()[1]
        return number
