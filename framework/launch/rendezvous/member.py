"""A node on its way to node 0: calls until it is answered, says what it is, and waits for GO.

`meet` is the door to this room: before any rank starts, node 0 listens, the others call, and all are compared. A wrong
topology would otherwise be a silent hang of twice the timeout. Everything that differs is told at once, to every node,
and each ends with 78.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final

from framework.doctor.node.links import Reached
from framework.errors import MISSING, ConfigError, PeerLostError, Problem, RunStopped
from framework.launch.job import print_line
from framework.launch.rendezvous.connectivity import (
    PortInUse,
    call_others,
    dial,
    in_background,
    is_address,
    is_loopback,
    listen_at,
    resolve,
    targets_of,
)
from framework.launch.rendezvous.coordinator import Coordinator
from framework.launch.rendezvous.messages import (
    BEAT_SECONDS,
    PROTOCOL,
    SILENCE_SECONDS,
    ConnectionLost,
    Link,
    Message,
    NoAgent,
    Peers,
    foreign,
    is_proof,
    proof,
    readable,
)
from framework.launch.rendezvous.session import (
    CALLING_SECONDS,
    HANDSHAKE_SECONDS,
    LOOK_SECONDS,
    SPARE_CONNECTIONS,
    Session,
)

_PORT_IN_USE_SECONDS: Final = 5.0
# A name may still mean the last pod of this rank: name servers keep an answer for half a minute, some of them behind
# each other.
_DOUBT_SECONDS: Final = 120.0
_HOLDER_SECONDS: Final = 30.0
_LOOK_UP_SECONDS: Final = 2.0
_EVERY_ADDRESS: Final = ("0.0.0.0", "::")  # what a listener is bound to where the name has a loopback address as well
# The kubelet gives it to every container.
_OF_A_POD: Final = "KUBERNETES_SERVICE_HOST"
_NO_AGENT_SECONDS: Final = 20.0
_HOLDER_AFTER_SECONDS: Final = 5.0
# Node 0 keeps the deadline and says why, so that nobody else is the first to leave.
_AFTER_DEADLINE_SECONDS: Final = 30.0
_MOST_VISITS: Final = 64
_LONGEST_REPORT: Final = 500
_LONGEST_TOKEN: Final = 64
_STATED: Final = ("kind", "reason", "fix", "key", "file")  # of a problem, as texts


class AddressHolder:
    """A node that has node 0's address, and is not node 0: somebody has to tell those who call there.

    Perhaps its hostfile is in another order, and node 0 waits elsewhere: the other hosts are asked once, so that it
    hears what differs. Or the name is that of a pod which has come back elsewhere, and this one has its old address:
    the name is looked up again and again, and in a pod nobody is told before no name server can have the old answer any
    more.
    """

    def __init__(self, meeting: Session, listener: socket.socket, *, visits: Sequence[Member] = ()) -> None:
        self._meeting, self._listener = meeting, listener
        self._visits = list(visits)
        self._found: list[Problem] = []
        self._links: list[Link] = []
        self._greeted: list[Link] = []
        self._reported_at = 0.0
        self._opened_at = self._looked_up_at = time.monotonic()
        self._lookup: Future[list[str]] | None = None
        self._is_named = not is_address(meeting.topology.master_addr)
        self._problem = elsewhere_problem(meeting)

    def step(self) -> bool:
        """Tell whoever calls; raises ConfigError when that is done; false when the name leads elsewhere by now."""
        now = time.monotonic()
        ready = readable([self._listener, *self._links], LOOK_SECONDS)
        if self._listener in ready and len(self._links) < self._meeting.topology.nnodes + SPARE_CONNECTIONS:
            self._accept()
        for link in [link for link in self._links if link in ready]:
            try:
                if any(message["type"] == "hello" for message in link.receive()):
                    self._greeted.append(link)
            except ConnectionLost:
                self._links.remove(link)
                self._greeted = [each for each in self._greeted if each is not link]
                link.close()
        if self._has_moved(now):
            self._close()
            return False
        doubt = _DOUBT_SECONDS if self._is_named and _OF_A_POD in os.environ else 0.0
        is_sure = now - self._meeting.started_at > doubt
        while is_sure and self._greeted:
            self._greeted.pop().send("nogo", problems=[self._problem.to_dict()])
            self._reported_at = self._reported_at or now
        for visit in list(self._visits):
            self._move(visit)
        is_heard = self._reported_at and now - self._reported_at > 2.0
        if is_heard or (is_sure and now - self._opened_at > _HOLDER_SECONDS):
            self._close()
            raise ConfigError([*self._found, self._problem])
        return True

    def _has_moved(self, now: float) -> bool:
        if self._lookup is None and self._is_named and now - self._looked_up_at > _LOOK_UP_SECONDS:
            self._lookup, self._looked_up_at = in_background(resolve, self._meeting.topology.master_addr), now
        if self._lookup is None or not self._lookup.done():
            return False
        found, self._lookup = self._lookup.result(), None
        return bool(found) and self._listener.getsockname()[0] not in (*found, *_EVERY_ADDRESS)

    def _close(self) -> None:
        closing: list[Any] = [self._listener, *self._links, *self._visits]
        for each in closing:
            each.close()

    def _move(self, visit: Member) -> None:
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
        try:
            connection, address = self._listener.accept()
        except OSError:
            return
        self._links.append(Link(connection, name=str(address[0])))
        # No welcome: this node proves nothing, and what it says is taken where no token is asked for.
        nonce, has_token = secrets.token_hex(16), bool(self._meeting.token)
        self._links[-1].send("challenge", protocol=PROTOCOL, nonce=nonce, token=has_token)


class Member:
    """A node on its way to node 0."""

    def __init__(self, meeting: Session, *, visited: str = "") -> None:
        """Call node 0, or once, as `AddressHolder` does, a host that is `visited` because node 0 may be there."""
        self._meeting = meeting
        self._visited = visited
        self._where = visited or meeting.topology.master_addr
        self._dial: Future[socket.socket | str] | None = None
        self._link: Link | None = None
        self._nonce = ""  # one for each connection
        self._challenge = ""
        self._why = "no answer yet"
        self._welcomed_at: float | None = None
        self._waits = "waiting for the others"
        self._calls: Future[dict[int, Reached]] | None = None
        self._calls_token = ""
        self._beaten_at = self._no_agent_since = self._next_dial_at = 0.0
        self._address_holder: AddressHolder | None = None

    def step(self) -> Peers | None:
        """One look; not None when all are there."""
        deadline = None
        if self._welcomed_at is not None:
            deadline = self._welcomed_at + self._meeting.deadline_seconds + _AFTER_DEADLINE_SECONDS
        try:
            self._meeting.look(self._waiting_for, deadline=deadline)
        except RunStopped:
            if self._link is not None:
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
            self._dial = in_background(dial, self._where, self._meeting.port)
        if self._dial is None:
            time.sleep(seconds)
            return
        if not wait([self._dial], seconds).done:
            return
        found = self._dial.result()
        self._dial, self._next_dial_at = None, math.inf if self._visited else time.monotonic() + 1.0
        self._why = found if isinstance(found, str) else ""
        if isinstance(found, socket.socket) and self._visited and _is_of_itself(found):
            found.close()  # another name of this host: this node has answered itself
        elif isinstance(found, socket.socket):
            self._meeting.local_address = str(found.getsockname()[0])
            self._link, self._nonce = Link(found, name="node 0"), secrets.token_hex(16)
            return
        self._no_agent_since = 0.0  # nothing listens there, so no other program does
        is_late = time.monotonic() - self._meeting.started_at > _HOLDER_AFTER_SECONDS
        if self._meeting.topology.node_rank and is_late and not self._visited:
            self._keep_master_address()

    def _keep_master_address(self) -> None:
        where, rank = self._meeting.topology.master_addr, self._meeting.topology.node_rank
        with suppress(PortInUse):
            if not is_loopback(where) and (listener := listen_at(where, self._meeting.port)) is not None:
                print_line(f"node {rank} has the address of node 0 ({where}); waiting for somebody to tell")
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
        if self._calls is not None and self._calls.done():
            failed = [[number, each.address, each.reason] for number, each in self._calls.result().items()]
            link.send("reached", token=self._calls_token, failed=failed)
            self._calls = None
        if self._challenge and now - self._beaten_at > BEAT_SECONDS:
            self._beaten_at = now
            link.send("beat")
        if now - link.heard_at > (SILENCE_SECONDS if self._challenge else HANDSHAKE_SECONDS):
            raise ConnectionLost("connected, but no agent answers there")
        return None

    def _heard(self, link: Link, message: Message) -> Peers | None:
        kind = message["type"]
        if kind == "challenge" and isinstance(message.get("nonce"), str) and not self._challenge:
            self._introduce(link, message)
        elif kind == "welcome" and self._challenge:
            self._check_welcome(message)
        elif kind == "nogo" and self._challenge:
            problems = _problems(message)
            # Said before a welcome it may be by anybody: believed only because it ends this node alone, and says why.
            is_known = any(problem.kind in ("token-refused", "node-rank-swapped") for problem in problems)
            if self._welcomed_at is not None or not self._meeting.token or is_known:
                raise ConfigError(problems)
        elif self._welcomed_at is None:
            return None
        elif kind in ("stop", "lost"):
            error = RunStopped if kind == "stop" else PeerLostError
            raise error(f"node 0: {str(message.get('why'))[:_LONGEST_REPORT]}")
        elif kind == "waiting":
            self._waits = str(message.get("text"))[:_LONGEST_REPORT]
        elif kind == "reach":
            self._calls_token = str(message.get("token"))[:_LONGEST_TOKEN]
            self._calls = in_background(call_others, targets_of(message), self._calls_token)
        elif kind == "go":
            return self._go(link, message)
        return None

    def _introduce(self, link: Link, challenge: Message) -> None:
        """Say who this is; the clock is compared with that of node 0."""
        token = self._meeting.token
        if bool(challenge.get("token")) != bool(token):
            reason = "it asks for a token" if challenge.get("token") else "it has no token, and this node has one"
            link.send("refused", why="token-refused")
            self.close()
            fix = "give every node the same DSF_TOKEN, or none"
            raise ConfigError.of("token-refused", reason, fix, file="node 0")
        self._challenge = challenge["nonce"]
        hello = {**self._meeting.hello, "clock": time.time()}
        if self._visited:
            hello["master_addr"] = self._meeting.topology.master_addr
        elif "look" in hello:
            with suppress(OSError):  # no port, no files: then nobody can try
                address = self._meeting.local_address
                hello["echo"] = [address, self._meeting.answer_at(address)]
        signed = proof(token, role="node", nonces=(self._challenge, self._nonce), content=hello)
        link.send("hello", hello=hello, nonce=self._nonce, proof=signed)

    def _check_welcome(self, message: Message) -> None:
        nonces = (self._challenge, self._nonce)
        if not is_proof(message.get("proof"), proof(self._meeting.token, role="lead", nonces=nonces, content={})):
            raise ConnectionLost("whoever answers there does not know the token")
        self._welcomed_at, self._no_agent_since = time.monotonic(), 0.0

    def _go(self, link: Link, message: Message) -> Peers:
        hosts, topology = message.get("hosts"), self._meeting.topology
        nodes = dict.fromkeys(map(str, range(topology.nnodes)), "")
        if message.get("nnodes") == topology.nnodes:
            hosts = nodes | {str(topology.node_rank): self._meeting.hello["host"]}
        if not isinstance(hosts, dict) or hosts.keys() != nodes.keys():
            raise foreign()
        return Peers(topology.node_rank, {0: link}, {int(node): str(host)[:255] for node, host in hosts.items()})

    def _note_no_agent(self, lost: ConnectionLost) -> None:
        """A while of something that is none of us is a port in use. Silence may be a node 0 that is busy."""
        if not isinstance(lost, NoAgent) or self._challenge:
            self._no_agent_since = 0.0
            return
        now = time.monotonic()
        self._no_agent_since = self._no_agent_since or now
        if now - self._no_agent_since > _NO_AGENT_SECONDS:
            reason = f"what answers at {self._where}:{self._meeting.port} is no agent: {self._why}"
            raise _port_error(self._meeting.port, reason, fix="give all nodes another --master_port")


def _port_error(port: int, reason: str, fix: str, *, file: str = "") -> ConfigError:
    return ConfigError.of("port-not-usable", reason, fix, key="--control_port", value=port, file=file)


def _is_of_itself(connection: socket.socket) -> bool:
    with suppress(OSError):
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    return False


def _problems(message: Message) -> list[Problem]:
    found, refused = message.get("problems"), []
    for item in found[:200] if isinstance(found, list) else ():
        if isinstance(item, dict):
            stated: dict[str, Any] = {name: str(item.get(name, ""))[:300] for name in _STATED}
            value = item.get("value")
            refused.append(Problem(**stated, value=value if isinstance(value, (str, int)) else MISSING))
    return refused or [Problem("node-refused", "it refused, and said no reason", "read its output", file="node 0")]


def elsewhere_problem(meeting: Session) -> Problem:
    """Node 0 and master_addr are not on one machine; said by either."""
    rank, value = meeting.topology.node_rank, meeting.topology.master_addr
    is_of = f"this is the address of node {rank}, not of node 0" if rank else "node 0 does not have this address"
    fix, file = "give node rank 0 to the host whose address is master_addr", f"node {rank} ({meeting.hello['host']})"
    return Problem("node-rank-swapped", is_of, fix, key="master_addr", value=value, file=file)


def meet(meeting: Session) -> Peers:
    """Wait for all nodes, and compare them.

    Raises:
        ConfigError: nodes disagree, or the port cannot be used.
        PeerLostError: not all came in time.
        RunStopped: somebody asked for that.
    """
    topology = meeting.topology
    if topology.nnodes == 1:
        return Peers(0, {}, {0: str(meeting.hello["host"])})
    try:
        if topology.node_rank == 0:
            return _coordinate_or_join(meeting)
        member = Member(meeting)
        while (peers := member.step()) is None:
            pass
        return peers
    finally:
        meeting.close()


def _coordinate_or_join(meeting: Session) -> Peers:
    """Node 0 listens as soon as master_addr is an address of this machine; until then it asks who listens there."""
    master, caller = meeting.topology.master_addr, Member(meeting)
    while True:
        try:
            # Who speaks with another node 0 hears it out: its last word lies there, perhaps, and its port is free
            # already.
            listener = None if caller.is_heard else listen_at(master, meeting.port)
            if listener is not None:
                caller.close()
                return Coordinator(meeting, listener).wait()
        except PortInUse as in_use:
            # Perhaps by another node 0, which will say so; not by an agent, if nobody has asked who we are by now.
            if not caller.is_heard and time.monotonic() - meeting.started_at > _PORT_IN_USE_SECONDS:
                reason = f"agents cannot meet at {in_use}: another program listens there"
                fix = "give all nodes another --master_port or --control_port"
                raise _port_error(meeting.port, reason, file="node 0", fix=fix) from None
        peers = caller.step()
        if peers is not None:
            return peers
        if resolve(master) and time.monotonic() - meeting.started_at > _DOUBT_SECONDS:
            raise ConfigError(elsewhere_problem(meeting))
