"""The connections to node 0 while it waits. The other end may be anything that found the port: connections, lines and
handshakes are bounded, and what is none of this job is counted and turned away.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from framework.launch.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.rendezvous.handshake import name_of
from framework.launch.rendezvous.messages import (
    BEAT_SECONDS,
    PROTOCOL,
    ConnectionLost,
    Link,
    Message,
    as_line,
    readable,
)
from framework.launch.rendezvous.session import HANDSHAKE_SECONDS, LOOK_SECONDS, SPARE_CONNECTIONS

_ALIVE_SECONDS: Final = 3 * BEAT_SECONDS
_AT_ONCE: Final = 256  # accepted, before those that are there already are heard again
_NO_FILES_SECONDS: Final = 1.0
_SEE_OFF_SECONDS: Final = 2.0
_MOST_REMEMBERED: Final = 1000


class TurnedAway(ConnectionLost):
    """A caller that is none of this job, with the kind of the problem that it was told."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(f"{reason} [{kind}]")
        self.kind = kind


class Rejections:
    """Rejected connections: each address is logged once with each reason, and then the tenth time, the hundredth..."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._refused: dict[str, str] = {}  # address -> kind

    def add(self, address: str, how: ConnectionLost) -> None:
        """One more; whoever scans ports must not fill the log."""
        if isinstance(how, TurnedAway) and (address in self._refused or len(self._refused) < _MOST_REMEMBERED):
            self._refused[address] = how.kind
        key = (address, str(how))
        if key not in self._counts and len(self._counts) >= _MOST_REMEMBERED:
            key = ("other addresses", "")
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count == 1:
            print_line(f"a connection from {address} was turned away: {how}")
        elif str(count).strip("0") == "1":
            print_line(f"{count} connections from {key[0]} were turned away" + (f": {key[1]}" if key[1] else ""))

    def clear(self, address: str) -> None:
        """Somebody from there was let in."""
        self._refused.pop(address, None)

    def reported(self) -> str:
        """``; turned away: 10.0.0.3 (token-refused)``, or nothing: only of those that may be nodes of this job."""
        refused = [f"{address} ({kind})" for address, kind in self._refused.items()]
        return f"; turned away: {first_few(refused)}" if refused else ""


class Client:
    """A connection to node 0, before and after its HELLO, which is empty before."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.link = Link(connection, name=address)
        # A socket for both kinds of addresses tells an IPv4 one in the words of IPv6, which is no interface's.
        self.local_address = str(connection.getsockname()[0]).removeprefix("::ffff:")
        self.nonce = secrets.token_hex(16)
        self.challenged_at = time.time()
        self.hello: dict[str, Any] = {}

    @property
    def node(self) -> int:
        """Its rank."""
        return int(self.hello["node_rank"])

    @property
    def name(self) -> str:
        """As people know it."""
        return f"node {name_of(self.hello)}"


class Clients:
    """All connections to node 0; `version` is another number whenever a node has come or gone."""

    def __init__(self, listener: socket.socket, *, nnodes: int, has_token: bool) -> None:
        listener.setblocking(False)
        self._listener, self._has_token = listener, has_token
        self._most = nnodes + SPARE_CONNECTIONS
        self._clients: list[Client] = []
        self._beaten_at = self._accept_at = 0.0
        self._reported_no_files = False
        self.version = 0
        self.rejections = Rejections()

    @property
    def present(self) -> list[Client]:
        """The nodes among them."""
        return [client for client in self._clients if client.hello]

    def step(self, heard: Callable[[Client, Message], None], seconds: float) -> None:
        """Accept and read connections for at most so long; `heard` raises ConnectionLost for one that has to go."""
        listeners = [self._listener] if time.monotonic() >= self._accept_at else []
        ready = readable([*listeners, *(client.link for client in self._clients)], seconds)
        if self._listener in ready:
            self._accept()
        now = time.monotonic()
        beats = now - self._beaten_at > BEAT_SECONDS
        self._beaten_at = now if beats else self._beaten_at
        for client in list(self._clients):
            try:
                for message in client.link.receive() if client.link in ready else ():
                    heard(client, message)
                if client.hello and beats:
                    client.link.send("beat")
                silent = now - (client.link.heard_at if client.hello else client.link.opened_at)
                if silent > (_ALIVE_SECONDS if client.hello else HANDSHAKE_SECONDS):
                    raise ConnectionLost(f"silent for {silent:.0f} s")
            except ConnectionLost as lost:
                self.part(client, lost)

    def let_in(self, client: Client, hello: dict[str, Any]) -> None:
        """It is a node of this job."""
        client.hello = hello
        self.version += 1
        self.rejections.clear(client.link.name)

    def part(self, client: Client, how: ConnectionLost) -> None:
        """Close a connection, and say so."""
        self._clients.remove(client)
        client.link.close()
        if client.hello:
            self.version += 1
            print_line(f"{client.name} is gone again: {how}")
        else:
            self.rejections.add(client.link.name, how)

    def send_to_all(self, kind: str, **content: Any) -> None:
        """All nodes and whoever else is there."""
        line = as_line(kind, **content)
        for client in list(self._clients):
            try:
                client.link.send_line(line)
            except ConnectionLost as lost:
                self.part(client, lost)

    def see_off(self) -> None:
        """Let the nodes hang up first: closing a connection with unread beats takes back what is still on its way."""
        until = time.monotonic() + _SEE_OFF_SECONDS
        links = [client.link for client in self.present]
        while links and (left := until - time.monotonic()) > 0:
            ready = readable(links, min(left, LOOK_SECONDS))
            for link in list(links):
                try:
                    link.push()
                    if link in ready:
                        link.receive()
                except ConnectionLost:
                    links.remove(link)

    def close_unknown(self) -> None:
        """Only nodes are left."""
        for client in [client for client in self._clients if not client.hello]:
            self._clients.remove(client)
            client.link.close()

    def close(self) -> None:
        """Let nobody else in."""
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # whoever called is gone again
                # New connections stay pending until another one has closed.
                self._accept_at = time.monotonic() + _NO_FILES_SECONDS
                if not self._reported_no_files:
                    self._reported_no_files = True
                    reason = (error.strerror or str(error)).lower()
                    print_line(f"node 0 cannot let anybody else in: {reason}; raise ulimit -n")
                return
            self._enter(connection, str(address[0]))

    def _enter(self, connection: socket.socket, address: str) -> None:
        if len(self._clients) >= self._most:
            connection.close()
            self.rejections.add(address, ConnectionLost("there are more connections than nodes"))
            return
        with suppress(OSError):  # whoever called is gone again
            client = Client(connection, address)
            client.link.send("challenge", protocol=PROTOCOL, nonce=client.nonce, token=self._has_token)
            self._clients.append(client)
