"""A port for ranks to meet at, found seconds before one of them listens there. Standard library
only.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

# Linux gives whoever asks for any port one of these, and so it does to every connection that is
# made.
_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LARGEST: Final = 65_535
_TRIES: Final = 64
_ENOUGH: Final = 2000  # of fewer, jobs that start at the same moment would take the same


def free_port() -> int:
    """A port at which nobody listens on any address of this machine; where the kernel leaves enough
    out, one of those that it gives to nobody by itself: no other program is given it in the seconds
    until a rank listens there.
    """
    outside = range(_last_given() + 1, _LARGEST)  # without the last: some take the next one as well
    for port in random.SystemRandom().sample(outside, _TRIES) if len(outside) >= _ENOUGH else ():
        with suppress(OSError):
            return _bound(port)
    return _bound(0)


def _last_given() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(_GIVEN.read_text(encoding="ascii").split()[1])
    return _LARGEST


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("", port))
        number: int = probe.getsockname()[1]
        return number
