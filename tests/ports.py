"""Ports for tests that need a number before a server listens there.

A port that the kernel gave and got back is soon given to another: lanes of tests ask for hundreds
in a minute. So these are below the range that Linux gives by default, each
lane has its own, and no number comes twice soon.
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import ExitStack
from typing import Final

from tests import lanes

_NUM_PORTS: Final = 4000
_FIRST: Final = 17_000  # and so below 29500, where launchers meet
# so that two runs of the tests on one machine begin apart
_turns = itertools.count(os.getpid() % _NUM_PORTS)


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row."""
    lane = _FIRST + _NUM_PORTS * ((lanes.number() or 0) % 3)
    for _ in range(_NUM_PORTS):
        ports = [lane + next(_turns) % _NUM_PORTS for _ in range(count)]
        if ports[-1] - ports[0] == count - 1 and all(map(_is_free, ports)):
            return ports[0]
    raise RuntimeError(f"no {count} ports in a row are free from {lane} on")


def _is_free(port: int) -> bool:
    with ExitStack() as probes:
        for host in ("127.0.0.1", ""):
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True
