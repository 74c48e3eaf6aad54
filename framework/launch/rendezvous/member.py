"""A member on its way to the coordinator, and the holder of the coordinator's address that is not node 0.

A node on its way to node 0: calls until it is answered, says what it is, and waits for GO.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from framework.errors import MISSING, ConfigError, PeerLostError, Problem, RunStopped
from framework.launch.print_settings import print_line
from framework.launch.rendezvous.connectivity import (
    Calls,
    Dial,
    Lookup,
    PortInUse,
    is_address,
    is_loopback,
    listen_at,
    targets_of,
)
from framework.launch.rendezvous.messages import (
    BEAT_SECONDS,
    PROTOCOL,
    SILENCE_SECONDS,
    ConnectionLost,
    Link,
    Message,
    NoAgent,
    Peers,
    as_line,
    is_proof,
    proof,
    readable,
)
from framework.launch.rendezvous.session import (
    CALLING_SECONDS,
    DOUBT_SECONDS,
    HANDSHAKE_SECONDS,
    LOOK_SECONDS,
    SPARE_CONNECTIONS,
    Session,
    elsewhere_problem,
)

# A node that has node 0's address and is not node 0: somebody has to tell those who call there. Perhaps its hostfile
# is in another order, and node 0 is elsewhere and waits: the other hosts are asked once, so that a node 0 among them
# hears what differs. Or the name is that of a pod which has come back elsewhere, and this one has its old address:
# the name is looked up again and again, and in a pod nobody is told before no name server can have the old answer any
# more.


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
        """Accept a connection, which may be gone again by now."""
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


_NO_AGENT_SECONDS: Final = 20.0
_HOLDER_AFTER_SECONDS: Final = 5.0
# Node 0 keeps the deadline and says why, so that nobody else is the first to leave.
_AFTER_DEADLINE_SECONDS: Final = 30.0
_MOST_VISITS: Final = 64
_LONGEST_REPORT: Final = 500
_LONGEST_TOKEN: Final = 64


class Member:
    """A node on its way to node 0."""

    def __init__(self, meeting: Session, *, visited: str = "") -> None:
        """Call node 0.

        Args:
            meeting: this node's.
            visited: a host that is asked once instead, because node 0 may be there; what `AddressHolder` does.
        """
        self._meeting = meeting
        self._visited = visited
        self._where = visited or meeting.topology.master_addr
        self._dial: Dial | None = None
        self._link: Link | None = None
        self._nonce = ""  # one for each connection
        self._challenge = ""
        self._why = "no answer yet"
        self._welcomed_at: float | None = None
        self._waits = "waiting for the others"
        self._calls: Calls | None = None
        self._beaten_at = self._no_agent_since = self._next_dial_at = 0.0
        self._address_holder: AddressHolder | None = None

    def wait(self) -> Peers:
        """Until node 0 has spoken."""
        while True:
            peers = self.step()
            if peers is not None:
                return peers

    def step(self) -> Peers | None:
        """One look; not None when all are there."""
        deadline = None
        if self._welcomed_at is not None:
            deadline = self._welcomed_at + self._meeting.deadline_seconds + _AFTER_DEADLINE_SECONDS
        try:
            self._meeting.look(self._waiting_for, deadline=deadline)
        except RunStopped:
            if self._link is not None:
                with suppress(ConnectionLost):
                    self._link.send("stop", why=self._meeting.requests.asked)
            raise
        return self.move(LOOK_SECONDS)

    def move(self, seconds: float) -> Peers | None:
        """Call or listen, for at most so long; not None when all are there."""
        if self._link is None:
            self._call(seconds)
            return None
        try:
            return self._listen(self._link, seconds)
        except ConnectionLost as lost:
            self._why = str(lost)
            self._note_no_agent(lost)
            self.close()
            return None

    def _waiting_for(self) -> str:
        node_0 = f"node 0: {self._where}:{self._meeting.port}"
        return f"waiting for {node_0} ({self._why})" if self._welcomed_at is None else f"{node_0} is {self._waits}"

    @property
    def is_heard(self) -> bool:
        """An agent answers."""
        return bool(self._challenge)

    def close(self) -> None:
        """Hang up."""
        if self._link is not None:
            self._link.close()
        self._link, self._welcomed_at, self._challenge, self._calls = None, None, "", None

    def _call(self, seconds: float) -> None:
        if self._address_holder is not None:
            if not self._address_holder.step():
                print_line(f"{self._where} has another address by now")
                self._address_holder = None
            return
        if self._dial is None and time.monotonic() >= self._next_dial_at:
            self._dial = Dial(self._where, self._meeting.port)
        if self._dial is None or not self._dial.wait(seconds):
            time.sleep(0 if self._dial else seconds)
            return
        connection, self._why = self._dial.connection, self._dial.why
        self._dial, self._next_dial_at = None, math.inf if self._visited else time.monotonic() + 1.0
        if connection is not None and self._visited and _is_of_itself(connection):
            connection.close()  # another name of this host: this node has answered itself
        elif connection is not None:
            self._meeting.local_address = str(connection.getsockname()[0])
            self._link, self._nonce = Link(connection, name="node 0"), secrets.token_hex(16)
        if self._link is not None:
            return
        self._no_agent_since = 0.0  # nothing listens there, so no other program does
        is_late = time.monotonic() - self._meeting.started_at > _HOLDER_AFTER_SECONDS
        if self._meeting.topology.node_rank and is_late and not self._visited:
            self._keep_master_address()

    def _keep_master_address(self) -> None:
        """Node 0 should be here. If it is elsewhere it will call, as the others do, and must be told."""
        where = self._meeting.topology.master_addr
        with suppress(PortInUse):
            listener = None if is_loopback(where) else listen_at(where, self._meeting.port)
            if listener is None:
                return
            print_line(
                f"node {self._meeting.topology.node_rank} has the address of node 0 ({where}); waiting for somebody "
                "to tell"
            )
            others = [name.rpartition("@")[2] for name in self._meeting.names]
            visits = [Member(self._meeting, visited=name) for name in others if name != where][:_MOST_VISITS]
            self._address_holder = AddressHolder(self._meeting, listener, visits=visits)

    def _listen(self, link: Link, seconds: float) -> Peers | None:
        messages = link.receive() if readable([link], min(seconds, CALLING_SECONDS) if self._calls else seconds) else []
        for index, message in enumerate(messages):
            peers = self._heard(link, message)
            if peers is not None:
                peers.hear(0, messages[index + 1 :])
                return peers
        now = time.monotonic()
        if self._calls is not None and self._calls.is_over:
            link.pass_on(as_line("reached", **self._calls.reported()))
            self._calls = None
        if self._challenge and now - self._beaten_at > BEAT_SECONDS:
            self._beaten_at = now
            link.pass_on(as_line("beat"))
        if now - link.heard_at > (SILENCE_SECONDS if self._challenge else HANDSHAKE_SECONDS):
            raise ConnectionLost("connected, but no agent answers there")
        return None

    def _heard(self, link: Link, message: Message) -> Peers | None:
        kind = message["type"]
        if kind == "challenge" and isinstance(message.get("nonce"), str) and not self._challenge:
            self._introduce(link, message)
        elif kind == "welcome" and self._challenge:
            self._check_welcome(message)
        elif kind == "nogo" and self._challenge and self._may_refuse(message):
            raise ConfigError(_problems(message))
        elif self._welcomed_at is None:
            return None
        elif kind == "stop":
            raise RunStopped(f"node 0: {str(message.get('why'))[:_LONGEST_REPORT]}")
        elif kind == "lost":
            raise PeerLostError(f"node 0: {str(message.get('why'))[:_LONGEST_REPORT]}")
        elif kind == "waiting":
            self._waits = str(message.get("text"))[:_LONGEST_REPORT]
        elif kind == "reach":
            self._calls = Calls(targets_of(message), token=str(message.get("token"))[:_LONGEST_TOKEN])
        elif kind == "go":
            return self._go(link, message)
        return None

    def _introduce(self, link: Link, challenge: Message) -> None:
        """Say who this is; the clock is compared with that of node 0."""
        token = self._meeting.token
        if bool(challenge.get("token")) != bool(token):
            side = "asks for a token" if challenge.get("token") else "has no token, and this node has one"
            with suppress(ConnectionLost):
                link.send("refused", why="token-refused")
            self.close()
            raise ConfigError(
                Problem(
                    kind="token-refused",
                    file="node 0",
                    reason=f"it {side}",
                    fix="give every node the same DSF_TOKEN, or none",
                )
            )
        self._challenge = challenge["nonce"]
        hello = {**self._meeting.hello, "clock": time.time()}
        if self._visited:
            hello["master_addr"] = self._meeting.topology.master_addr
        elif "look" in hello:
            with suppress(OSError):  # no port, no files: then nobody can try
                address = self._meeting.local_address
                hello["echo"] = [address, self._meeting.answer_at(address)]
        signed = proof(token, role="node", nonces=(self._challenge, self._nonce), content=hello) if token else ""
        link.pass_on(as_line("hello", hello=hello, nonce=self._nonce, proof=signed))

    def _check_welcome(self, message: Message) -> None:
        token = self._meeting.token
        expected = proof(token, role="lead", nonces=(self._challenge, self._nonce), content={}) if token else ""
        if not is_proof(message.get("proof"), expected):
            raise ConnectionLost("whoever answers there does not know the token")
        self._welcomed_at, self._no_agent_since = time.monotonic(), 0.0

    def _may_refuse(self, message: Message) -> bool:
        """Said before a welcome it may be by anybody."""
        return self._welcomed_at is not None or not self._meeting.token or _is_token_refusal(message)

    def _go(self, link: Link, message: Message) -> Peers:
        hosts, topology = message.get("hosts"), self._meeting.topology
        if message.get("nnodes") == topology.nnodes:
            hosts = {str(node): "" for node in range(topology.nnodes)} | {
                str(topology.node_rank): self._meeting.hello["host"]
            }
        if not isinstance(hosts, dict) or set(hosts) != {str(node) for node in range(topology.nnodes)}:
            raise ConnectionLost("it does not speak this protocol")
        return Peers(topology.node_rank, {0: link}, {int(node): str(host)[:255] for node, host in hosts.items()})

    def _note_no_agent(self, lost: ConnectionLost) -> None:
        """Something speaks there that is none of us: a while of that is a port in use. Silence may be a node 0 that is
        busy.
        """
        if not isinstance(lost, NoAgent) or self._challenge:
            self._no_agent_since = 0.0
            return
        now = time.monotonic()
        self._no_agent_since = self._no_agent_since or now
        if now - self._no_agent_since > _NO_AGENT_SECONDS:
            where = f"{self._where}:{self._meeting.port}"
            raise ConfigError(
                Problem(
                    kind="port-not-usable",
                    key="--control_port",
                    value=self._meeting.port,
                    reason=f"what answers at {where} is no agent: {self._why}",
                    fix="give all nodes another --master_port",
                )
            )


def _is_of_itself(connection: socket.socket) -> bool:
    with suppress(OSError):
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    return False


def _is_token_refusal(message: Message) -> bool:
    """Said before a welcome, so by anybody: believed only because it ends this node alone, and says why."""
    return any(problem.kind in ("token-refused", "node-rank-swapped") for problem in _problems(message))


def _problems(message: Message) -> list[Problem]:
    """As node 0 found them."""
    found = message.get("problems")
    items = [item for item in found if isinstance(item, dict)][:200] if isinstance(found, list) else []
    refused = [
        Problem(
            kind=_text(item, "kind"),
            reason=_text(item, "reason"),
            fix=_text(item, "fix"),
            key=_text(item, "key"),
            file=_text(item, "file"),
            value=item["value"] if isinstance(item.get("value"), (str, int)) else MISSING,
        )
        for item in items
    ]
    return refused or [
        Problem(kind="node-refused", file="node 0", reason="it refused, and said no reason", fix="read its output")
    ]


def _text(item: Mapping[str, Any], name: str) -> str:
    return str(item.get(name, ""))[:300]
