"""What agents say to each other: JSON objects, one to a line, over TCP.

The other end may be anything that found the port, so a line, a queue and a handshake have limits, nothing but JSON is
read, and nothing that is read is run. With a shared token both sides prove that they know it before anything else is
believed; the token itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

PROTOCOL: Final = 2
# A HELLO with the facts of a node is some kilobytes.
LARGEST_LINE_BYTES: Final = 1 << 16
_LARGEST_QUEUE_BYTES: Final = 1 << 20

Message = Mapping[str, Any]


class _HasDescriptor(Hashable, Protocol):
    def fileno(self) -> int: ...


_Waiting = TypeVar("_Waiting", bound=_HasDescriptor)


class ConnectionLost(Exception):  # noqa: N818 - it is caught and told, not raised to a user
    """The connection is of no use any more; its text says how that came."""


class NoAgent(ConnectionLost):
    """What is at the other end is none of us."""


def readable(waiting: Iterable[_Waiting], seconds: float) -> set[_Waiting]:
    """Those with something to read, after at most so long; `select.select` takes no descriptor above 1023."""
    with selectors.PollSelector() as selector:
        for each in waiting:
            selector.register(each, selectors.EVENT_READ, each)
        return {key.data for key, _ in selector.select(seconds)}


class Link:
    """One connection, both ways, that never blocks.

    Attributes:
        name: who is at the other end, for messages.
        heard_at: `time.monotonic()` when something last came.
    """

    def __init__(self, connection: socket.socket, *, name: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self.name = name
        self.opened_at = self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, kind: str, **content: Any) -> None:
        """Queue a message and send what the connection takes now.

        Raises:
            ConnectionLost: the other end is gone, or reads nothing.
        """
        self._queue(as_line(kind, **content))
        self.flush()

    def pass_on(self, line: bytes) -> None:
        """Send what `as_line` has made, perhaps for many: a connection that is gone is found by `receive`, behind its
        last words.

        Raises:
            ConnectionLost: the other end reads nothing.
        """
        self._queue(line)
        self.push()

    def push(self) -> None:
        """As `flush`, and `receive` finds that the connection is gone."""
        with suppress(ConnectionLost):
            self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as it goes.

        Raises:
            ConnectionLost: the other end is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(error.strerror or "the connection broke") from None

    def receive(self) -> list[Message]:
        """What has come since.

        Raises:
            ConnectionLost: the other end is gone, or is none of us.
        """
        messages: list[Message] = []
        ended = self._read()
        while (end := self._received.find(b"\n")) >= 0:
            messages.append(_parse(bytes(self._received[:end])))
            del self._received[: end + 1]
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

    def _queue(self, line: bytes) -> None:
        self._unsent += line
        if len(self._unsent) > _LARGEST_QUEUE_BYTES:
            raise ConnectionLost("it reads nothing")

    def _read(self) -> str:
        """Take what is there, no more than a few lines at once; returns how the connection ended, or nothing."""
        try:
            content = self._connection.recv(LARGEST_LINE_BYTES)
        except BlockingIOError:
            return ""
        except OSError as error:
            return error.strerror or "the connection broke"
        if content:
            self._received += content
            self.heard_at = time.monotonic()
        return "" if content else "the connection was closed"


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line) if len(line) <= LARGEST_LINE_BYTES else None
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise NoAgent("it does not speak this protocol")
    return message


def as_line(kind: str, **content: Any) -> bytes:
    """A message as it travels."""
    return json.dumps({"type": kind, **content}).encode() + b"\n"


def proof(token: str, *, role: str, nonces: tuple[str, str], content: Message) -> str:
    """That the sender knows the token, for this connection, this role and this content alone."""
    text = json.dumps([role, *nonces, content], sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Compared in constant time. Anything may be given, also half a surrogate, which JSON can write and UTF-8
    cannot.
    """
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "backslashreplace"), expected.encode())
