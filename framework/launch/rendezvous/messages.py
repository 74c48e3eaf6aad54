"""Messages between agents, and `Peers`, the job's state as a node knows it.

A message is a JSON object on a line, over TCP. The other end may be anything that found the port, so a line, a queue
and a handshake have limits, nothing but JSON is read, and nothing that is read is run. With a shared token both sides
prove that they know it before anything else is believed; the token itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from framework.errors import EXIT_PEER_LOST

PROTOCOL: Final = 2
LARGEST_LINE_BYTES: Final = 1 << 16  # a HELLO with the facts of a node is some kilobytes
_LARGEST_QUEUE_BYTES: Final = 1 << 20
BEAT_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 15.0
# How nodes ended is passed on in lots: a thousand that end together would cost a million messages.
_ENDED_SECONDS: Final = 0.5
_MOST_ENDED: Final = 2000  # fit on one line

Message = Mapping[str, Any]


class ConnectionLost(Exception):  # noqa: N818 - it is caught and told, not raised to a user
    """The connection is of no use any more; its text says how that came."""


class NoAgent(ConnectionLost):
    """Error: the other end is no agent of this job."""


def foreign() -> NoAgent:
    """The error for a message that no agent of this release sends."""
    return NoAgent("it does not speak this protocol")


def readable(waiting: Iterable[Any], seconds: float) -> set[Any]:
    """Return the links with something to read, after so long at most; `select` takes no descriptor above 1023."""
    with selectors.PollSelector() as selector:
        for each in waiting:
            selector.register(each, selectors.EVENT_READ, each)
        return {key.data for key, _ in selector.select(seconds)}


class Link:
    """One connection, both ways, that never blocks. That it is gone is found by `receive`, behind its last words."""

    def __init__(self, connection: socket.socket, *, name: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._received = b""
        self._unsent = bytearray()
        self.name = name
        self.opened_at = self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """For `readable`."""
        return self._connection.fileno()

    def send(self, kind: str, /, **content: Any) -> None:
        """Queue a message and send what goes now; ConnectionLost where the other end reads nothing."""
        self.send_line(as_line(kind, **content))

    def send_line(self, line: bytes) -> None:
        """Do the same with what `as_line` has made, perhaps for many."""
        self._unsent += line
        if len(self._unsent) > _LARGEST_QUEUE_BYTES:
            raise ConnectionLost("it reads nothing")
        self.push()

    def push(self) -> None:
        """Send what is queued, as far as it goes."""
        with suppress(OSError):
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]

    def receive(self) -> list[Message]:
        """What has come since; ConnectionLost where the other end is gone, or is none of us."""
        content, ended = b"", ""
        try:
            content = self._connection.recv(LARGEST_LINE_BYTES)
            if content:
                self.heard_at = time.monotonic()
            else:
                ended = "the connection was closed"
        except BlockingIOError:
            pass
        except OSError as error:
            ended = error.strerror or "the connection broke"
        *lines, self._received = (self._received + content).split(b"\n")
        messages = [_parse(line) for line in lines]
        if len(self._received) > LARGEST_LINE_BYTES:
            raise NoAgent("it sends lines without an end")
        # What was said before the end counts; the end itself is met again at the next look.
        if ended and not messages:
            raise ConnectionLost(ended)
        return messages

    def close(self) -> None:
        """After sending what is queued, if that goes at once."""
        self.push()
        self._connection.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line) if len(line) <= LARGEST_LINE_BYTES else None
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise foreign()
    return message


def as_line(kind: str, /, **content: Any) -> bytes:
    """A message as it travels."""
    return json.dumps({"type": kind, **content}).encode() + b"\n"


def proof(token: str, *, role: str, nonces: tuple[str, str], content: Message) -> str:
    """Compute the proof that the sender knows the token, if there is one, for this connection, role and content."""
    if not token:
        return ""
    text = json.dumps([role, *nonces, content], sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Compare in constant time. JSON can also write half a surrogate, which UTF-8 cannot."""
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "backslashreplace"), expected.encode())


@dataclass(frozen=True)
class Failure:
    """Why the job ends before its end.

    Attributes:
        what: who and how, a line: ``node 1 (demo-1) rank 3: killed by SIGKILL (137, out of memory?)``.
        code: exit code of that node.
        at: time of day there.
    """

    node: int
    what: str
    code: int
    at: str


class Peers:
    """State of the job as this node knows it. Node 0 passes everything on to everybody, so all nodes know the same and
    decide alike. A link that closes, or is silent for 15 s, is a lost node. Every message names the node it is about.

    Attributes:
        failures: in the order in which node 0 heard of them.
        stop: who asked for a stop, and how; empty before.
        killed: no time for a checkpoint any more.
        ended: exit code of every node whose ranks have ended.
    """

    def __init__(self, node_rank: int, links: Mapping[int, Link], hosts: Mapping[int, str]) -> None:
        self._node_rank = node_rank
        self._links = dict(links)  # of node 0: to all others; elsewhere: to node 0
        self._hosts = dict(hosts)
        self._beaten_at = self._ended_reported_at = 0.0
        self.failures: list[Failure] = []
        self.stop = ""
        self.killed = False
        self.ended: dict[int, int] = {}
        self._untold: list[int] = []  # on node 0: those whose end has not been passed on yet
        for link in self._links.values():
            link.heard_at = time.monotonic()

    @property
    def all_ended(self) -> bool:
        """Every node has said how it ended, or is lost."""
        return len(self.ended) == len(self._hosts)

    @property
    def is_cut_off(self) -> bool:
        """Nobody is left to hear from."""
        return len(self._hosts) > 1 and not self._links

    @property
    def missing(self) -> list[str]:
        """Nodes that have not said how they ended."""
        return [self.name(node) for node in self._hosts if node not in self.ended]

    def name(self, node: int) -> str:
        """As people know it."""
        host = self._hosts[node]
        return f"node {node} ({host})" if host else f"node {node}"

    def send_stop(self, why: str) -> None:
        """All ranks of all nodes are to stop."""
        self.send("stop", why=why)

    def send_failure(self, what: str, *, code: int) -> None:
        """This node has failed; the others end."""
        self.send("failure", what=what, code=code, at=time.strftime("%H:%M:%S"))

    def send_ended(self, code: int) -> None:
        """No rank runs here any more."""
        self.send("ended", code=code)

    def poll(self, seconds: float) -> None:
        """Hear what the others say, for at most so long."""
        if not self._links:
            time.sleep(seconds)
            return
        now = time.monotonic()
        if now - self._beaten_at > BEAT_SECONDS:
            self._beaten_at = now
            self._send_all("beat")
        ready = readable(self._links.values(), seconds)
        for node, link in list(self._links.items()):
            try:
                link.push()
                self.hear(node, link.receive() if link in ready else ())
                if time.monotonic() - link.heard_at > SILENCE_SECONDS:
                    raise ConnectionLost(f"silent for {SILENCE_SECONDS:.0f} s")
            except ConnectionLost as lost:
                self._lose(node, lost)
        if self.all_ended or time.monotonic() - self._ended_reported_at > _ENDED_SECONDS:
            self._pass_on_ends()

    def hear(self, sender: int, messages: Sequence[Message]) -> None:
        """Take what a node has said; one that says what none of us does is lost."""
        try:
            for message in messages:
                self._heard(sender, message)
        except ConnectionLost as lost:
            self._lose(sender, lost)

    def close(self) -> None:
        """Nothing more to say."""
        self._pass_on_ends()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def send(self, kind: str, **content: Any) -> None:
        """Tell all nodes of this one; ``kill``: there is no time for a checkpoint."""
        content["node"] = self._node_rank
        # Node 0 sends what it hears back to everybody, the speaker included: all see one order.
        if self._node_rank == 0 or not self._links:
            self._apply(kind, content)
        if self._node_rank or kind != "ended":
            self._send_all(kind, **content)

    def _pass_on_ends(self) -> None:
        """On node 0: tell all others what was heard of ends; one that reads nothing is found lost, and told as well."""
        while self._untold:
            nodes, self._untold = self._untold[:_MOST_ENDED], self._untold[_MOST_ENDED:]
            self._send_all("ended", codes={str(node): self.ended[node] for node in nodes})
        self._ended_reported_at = time.monotonic()

    def _send_all(self, kind: str, /, **content: Any) -> None:
        line = as_line(kind, **content)
        for node, link in list(self._links.items()):
            try:
                link.send_line(line)
            except ConnectionLost as lost:
                self._lose(node, lost)

    def _heard(self, sender: int, message: Message) -> None:
        content = dict(message)
        kind = content.pop("type")
        if kind == "beat":
            return
        if kind == "ended" and "codes" in content and self._node_rank:
            self.ended |= self._codes(content["codes"])
            return
        # Who was asked to stop just before it heard GO has named nobody: it speaks for itself.
        node = content.setdefault("node", sender) if self._node_rank == 0 else content.get("node")
        if type(node) is not int or node not in self._hosts or (self._node_rank == 0 and node != sender):
            raise ConnectionLost("it speaks for another node")
        self._apply(kind, content)
        if self._node_rank == 0 and kind != "ended":
            self._send_all(kind, **content)

    def _codes(self, reported: object) -> dict[int, int]:
        """Node -> exit code, as node 0 says it."""
        nodes = {str(node): node for node in self._hosts}
        if (
            not isinstance(reported, dict)
            or not nodes.keys() >= reported.keys()
            or {*map(type, reported.values())} - {int}
        ):
            raise foreign()
        return {nodes[node]: code for node, code in reported.items()}

    def _apply(self, kind: str, content: Message) -> None:
        node, why, code = content["node"], content.get("why", content.get("what", "")), content.get("code", 0)
        if not isinstance(why, str) or not isinstance(code, int):
            raise foreign()
        if kind == "stop":
            self.stop = self.stop or f"{why} at {self.name(node)}"
        elif kind == "kill":
            self.killed = True
        elif kind == "failure":
            self.failures.append(Failure(node, why[:500], code, str(content.get("at", ""))[:20]))
        elif kind == "ended":
            self._end(node, code)

    def _end(self, node: int, code: int) -> None:
        self.ended[node] = code
        if self._node_rank == 0:
            self._untold.append(node)

    def _lose(self, node: int, how: ConnectionLost) -> None:
        link = self._links.pop(node, None)
        if link is None:
            return
        with suppress(OSError):
            link.close()
        # Whoever has said its last word may leave; node 0 only when it has told everybody everything.
        if node in self.ended and (self._node_rank == 0 or self.all_ended):
            return
        failure = Failure(node, f"{self.name(node)}: lost: {how}", EXIT_PEER_LOST, time.strftime("%H:%M:%S"))
        self.failures.append(failure)
        if node not in self.ended:
            self._end(node, EXIT_PEER_LOST)
        if self._node_rank == 0:
            self._send_all("failure", **asdict(failure))
