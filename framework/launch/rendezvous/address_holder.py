"""A node that has node 0's address and is not node 0: somebody has to tell those who call there.

Perhaps its hostfile is in another order, and node 0 is elsewhere and waits: the other hosts are asked once, so that a
node 0 among them hears what differs.

Or the name is that of a pod which has come back elsewhere, and this one has its old address: the name is looked up
again and again, and in a pod nobody is told before no name server can have the old answer any more.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from framework.errors import ConfigError, Problem
from framework.launch.rendezvous.addresses import Lookup, is_address
from framework.launch.rendezvous.messages import PROTOCOL, ConnectionLost, Link, readable
from framework.launch.rendezvous.session import (
    DOUBT_SECONDS,
    LOOK_SECONDS,
    SPARE_CONNECTIONS,
    Session,
    elsewhere_problem,
)

_HOLDER_SECONDS: Final = 30.0
_LOOK_UP_SECONDS: Final = 2.0
_EVERY_ADDRESS: Final = ("0.0.0.0", "::")  # what a listener is bound to where the name has a loopback address as well
# The kubelet gives it to every container.
_OF_A_POD: Final = "KUBERNETES_SERVICE_HOST"


class Visit(Protocol):
    """One call to a host that may be node 0."""

    def move(self, seconds: float) -> object:
        """Go on, for at most so long; raises ConfigError with what node 0 says there."""

    def close(self) -> None:
        """Hang up."""


class AddressHolder:
    """A node that has node 0's address, and is not node 0."""

    def __init__(self, meeting: Session, listener: socket.socket, *, visits: Sequence[Visit] = ()) -> None:
        self._meeting, self._listener = meeting, listener
        self._visits = list(visits)
        self._found: list[Problem] = []
        self._links: list[Link] = []
        self._greeted: list[Link] = []
        self._reported_at = 0.0
        self._opened_at = self._looked_up_at = time.monotonic()
        self._lookup: Lookup | None = None
        self._is_named = not is_address(meeting.topology.master_addr)
        self._problem = elsewhere_problem(meeting)

    def step(self) -> bool:
        """Tell whoever calls; raises ConfigError when that is done, and is false when the address is another node's by
        now.
        """
        now = time.monotonic()
        waiting: list[Any] = [self._listener, *self._links]
        ready = readable(waiting, LOOK_SECONDS)
        if self._listener in ready and len(self._links) < self._meeting.topology.nnodes + SPARE_CONNECTIONS:
            self._accept()
        for link in [link for link in self._links if link in ready]:
            try:
                if any(message["type"] == "hello" for message in link.receive()):
                    self._greeted.append(link)
            except ConnectionLost:
                self._hang_up(link)
        if self._has_moved(now):
            self._close()
            return False
        doubt = DOUBT_SECONDS if self._is_named and _OF_A_POD in os.environ else 0.0
        is_sure = now - self._meeting.started_at > doubt
        if is_sure:
            self._report(now)
        for visit in list(self._visits):
            self._move(visit)
        if (self._reported_at and now - self._reported_at > 2.0) or (
            is_sure and now - self._opened_at > _HOLDER_SECONDS
        ):
            self._close()
            raise ConfigError([*self._found, self._problem])
        return True

    def _has_moved(self, now: float) -> bool:
        """The name leads somewhere else."""
        if self._lookup is None and self._is_named and now - self._looked_up_at > _LOOK_UP_SECONDS:
            self._lookup, self._looked_up_at = Lookup(self._meeting.topology.master_addr), now
        if self._lookup is None or self._lookup.addresses is None:
            return False
        found, self._lookup = self._lookup.addresses, None
        return bool(found) and self._listener.getsockname()[0] not in (*found, *_EVERY_ADDRESS)

    def _report(self, now: float) -> None:
        for link in self._greeted:
            try:
                link.send("nogo", problems=[self._problem.to_dict()])
                self._reported_at = self._reported_at or now
            except ConnectionLost:
                self._hang_up(link)
        self._greeted = []

    def _hang_up(self, link: Link) -> None:
        self._links = [each for each in self._links if each is not link]
        self._greeted = [each for each in self._greeted if each is not link]
        link.close()

    def _close(self) -> None:
        self._listener.close()
        closing: list[Link | Visit] = [*self._links, *self._visits]
        for each in closing:
            each.close()

    def _move(self, visit: Visit) -> None:
        try:
            visit.move(0)
        except ConfigError as error:
            self._visits.remove(visit)
            visit.close()
            # Another job may be there; it has nothing to say about this one.
            if not any(problem.kind in ("token-refused", "other-job") for problem in error.problems):
                self._found += error.problems
                self._reported_at = self._reported_at or time.monotonic()

    def _accept(self) -> None:
        """Whoever called may be gone again by now."""
        try:
            connection, address = self._listener.accept()
        except OSError:
            return
        link = Link(connection, name=str(address[0]))
        try:
            # No welcome: this node proves nothing, and what it says is taken where no token is asked for.
            link.send("challenge", protocol=PROTOCOL, nonce=secrets.token_hex(16), token=bool(self._meeting.token))
            self._links.append(link)
        except ConnectionLost:
            link.close()
