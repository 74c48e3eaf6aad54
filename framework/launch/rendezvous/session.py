"""State that both sides of a rendezvous share: the node's identity, its HELLO, and the checks of every wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from framework.doctor.node.links import Echo
from framework.errors import PeerLostError, Problem
from framework.launch.hosts.topology import Topology
from framework.launch.job import print_line
from framework.launch.stop_requests import StopRequests

HANDSHAKE_SECONDS: Final = 10.0
SPARE_CONNECTIONS: Final = 64  # connections beyond one per node that may wait for their handshake at once
LOOK_SECONDS: Final = 0.2
CALLING_SECONDS: Final = 0.01  # between looks for calls to other nodes that have ended, which wake nobody
_REPORT_SECONDS: Final = 15.0


@dataclass
class Session:
    """One node's way to its peers.

    Attributes:
        port: of the agents.
        hello: what it says about itself; `handshake.HELLO` has the names.
        names: of the hosts, where a hostfile tells them.
        problems: what keeps node 0 from training; the others are to hear of it.
        local_address: on which this node and the others reach each other, once they have met.
    """

    topology: Topology
    port: int
    hello: Mapping[str, Any]
    requests: StopRequests
    token: str = ""
    deadline_seconds: float = 1800.0
    names: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    local_address: str = field(default="", init=False)
    _echoes: dict[tuple[str, int], Echo] = field(default_factory=dict, init=False)
    started_at: float = field(default_factory=time.monotonic, init=False)
    _reported_at: float = field(default=0.0, init=False)

    def look(self, waiting_for: Callable[[], str], *, deadline: float | None = None) -> None:
        """Run the checks of every wait: take requests, keep the deadline, log missing nodes every 15 s.

        Args:
            waiting_for: in words.
            deadline: `time.monotonic()` at which the wait is over, if not after `deadline_seconds`.

        Raises:
            RunStopped, PeerLostError: the wait is over.
        """
        self.requests.refuse_start()
        if self.requests.lost:
            raise PeerLostError(f"another host has ended before all nodes were there; {waiting_for()} [peer-lost]")
        now = time.monotonic()
        if now > (self.started_at + self.deadline_seconds if deadline is None else deadline):
            raise PeerLostError(
                f"not all nodes came within {self.deadline_seconds:.0f} s; {waiting_for()} [rendezvous-timeout]"
            )
        if now - self._reported_at > _REPORT_SECONDS:
            if self._reported_at:
                print_line(waiting_for())
            self._reported_at = now if self._reported_at else now - _REPORT_SECONDS + 3  # the first time after 3 s

    def answer_at(self, address: str, port: int = 0) -> int:
        """Answer at a port, or at any that is free, until `close`, so that others can try this node; returns it."""
        if (address, port) not in self._echoes:
            self._echoes[address, port] = Echo(port, address=address)
        return self._echoes[address, port].port

    def close(self) -> None:
        """Answer nobody any more."""
        for echo in self._echoes.values():
            echo.close()
        self._echoes.clear()
