"""Channels between agents: one TCP connection, both ways, for the life of a job.

A message is a JSON object on a line. The other end may be anything that found the port, so lines
and queues have limits, nothing but JSON is read, and nothing that is read is run. With a shared
token both sides prove in the handshake that they know it, and every further line is signed with a
key of this connection, direction and place in the order: a line that was changed, repeated, left
out or slipped in ends the connection. The token itself never travels.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, cast

PROTOCOL: Final = 4
LARGEST_LINE_BYTES: Final = 1 << 16  # a HELLO with the facts of a node is some kilobytes
_LARGEST_QUEUE_BYTES: Final = 1 << 20
_LARGEST_QUEUE: Final = 4096  # messages that have come and were not taken
_SIGNATURE_CHARACTERS: Final = 32
_LONGEST_REASON: Final = 200

Message = Mapping[str, Any]


class ConnectionLost(Exception):  # noqa: N818 - it is caught, not raised to a user
    """The connection is of no use any more; its text says how that came."""


class NoAgent(ConnectionLost):
    """Error: the other end is no agent of this job."""


def foreign() -> NoAgent:
    """The error for a message that no agent of this release sends."""
    return NoAgent("it does not speak this protocol")


class Channel(asyncio.Protocol):
    """One connection. What came before its end is received before the end is.

    Attributes:
        name: address of the other end, for messages.
        heard_at: `time.monotonic()` when something came last, or of its beginning.
    """

    def __init__(self, opened: Callable[[Channel], None] | None = None) -> None:
        """Call `opened` as soon as it is connected, where a listener makes it."""
        self._opened = opened
        self._received = b""
        # read when they are received: a key may be agreed on meanwhile
        self._lines: deque[bytes] = deque()
        self._ended: ConnectionLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._keys: tuple[bytes, bytes] | None = None
        self._num_sent = self._num_received = 0
        self.name = self.local_address = ""
        self.heard_at = time.monotonic()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A socket for both kinds of addresses gives an IPv4 one in the form of IPv6, which is no
        # interface's.
        self.local_address = str(connection.getsockname()[0]).removeprefix("::ffff:")
        # it may be gone already
        self.name = str((transport.get_extra_info("peername") or ("",))[0])
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Take lines apart."""
        self.heard_at = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        self._lines += lines
        if len(self._received) > LARGEST_LINE_BYTES or len(self._lines) > _LARGEST_QUEUE:
            self._end(NoAgent("it sends lines without an end"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take what lies in the connection still: a failed write ends it before it was read."""
        with suppress(OSError, ValueError):
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
            with socket.socket(fileno=descriptor) as connection:
                connection.setblocking(False)
                while self._ended is None and (data := connection.recv(LARGEST_LINE_BYTES)):
                    self.data_received(data)
        reason = getattr(exc, "strerror", None) or (
            str(exc) if exc else "the connection was closed"
        )
        self._end(ConnectionLost(reason))

    # What agents call.

    def sign(self, token: str, *, is_lead: bool, nonces: tuple[str, str]) -> None:
        """Sign and check every line from here on, if there is a token."""
        if token:
            key = _mac(token.encode(), "session", *nonces)
            lead = _mac(key, "lead")
            node = _mac(key, "node")
            self._keys = (lead, node) if is_lead else (node, lead)

    def send(self, kind: str, /, **content: Any) -> None:
        """Queue a message; ConnectionLost where the other end reads nothing. Of one that is gone
        `receive` knows.
        """
        self.send_body(body_of(kind, **content))

    def send_body(self, body: bytes) -> None:
        """Do the same with what `body_of` has made, perhaps for many."""
        if self._keys is not None:
            body = _signature(self._keys[0], self._num_sent, body) + body
            self._num_sent += 1
        if not self._transport.is_closing():
            self._transport.write(body + b"\n")
        if self._transport.get_write_buffer_size() > _LARGEST_QUEUE_BYTES:
            self._transport.abort()
            raise ConnectionLost("it reads nothing")

    async def receive(self) -> Message:
        """Wait for the next message; ConnectionLost where the other end is gone, or is none of
        us.
        """
        while not self._lines:
            if self._ended is not None:
                raise self._ended
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        line = self._lines.popleft()
        try:
            if self._keys is not None:
                given = line[:_SIGNATURE_CHARACTERS]
                line = line[_SIGNATURE_CHARACTERS:]
                if not hmac.compare_digest(
                    given, _signature(self._keys[1], self._num_received, line)
                ):
                    raise NoAgent("a message is not signed with the token of this job")
                self._num_received += 1
            return _parse(line)
        except NoAgent as wrong:
            self._lines.clear()
            self._end(wrong)
            raise

    def close(self) -> None:
        """Hang up, after sending what is queued if that goes."""
        self._transport.close()

    def _end(self, how: ConnectionLost) -> None:
        self._ended = self._ended or how
        self._transport.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and (self._lines or self._ended):
            self._waiter.set_result(None)


def _parse(line: bytes) -> Message:
    try:
        if len(line) <= LARGEST_LINE_BYTES:
            message = json.loads(line)
        else:
            message = None
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise foreign()
    return message


def body_of(kind: str, /, **content: Any) -> bytes:
    """A message as it travels, without its signature."""
    return json.dumps({"type": kind, **content}).encode()


def _mac(key: bytes, *texts: str) -> bytes:
    return hmac.digest(key, json.dumps(texts).encode(), "sha256")


def _signature(key: bytes, number: int, body: bytes) -> bytes:
    # The digest of the body apart: a message to a thousand nodes is long once, and signed a
    # thousand times.
    signed = hmac.digest(key, number.to_bytes(8, "big") + hashlib.sha256(body).digest(), "sha256")
    return signed.hex()[:_SIGNATURE_CHARACTERS].encode()


def new_nonce() -> str:
    """Make a number that is used once."""
    return secrets.token_hex(16)


def proof(token: str, *, role: str, nonces: tuple[str, str], content: Message) -> str:
    """Compute the proof that the sender knows the token, if there is one, for this connection, role
    and content.
    """
    if not token:
        return ""
    return _mac(token.encode(), role, *nonces, json.dumps(content, sort_keys=True)).hex()


def is_proof(given: object, expected: str) -> bool:
    """Compare in constant time. JSON can also write half a surrogate, which UTF-8 cannot."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode("utf-8", "backslashreplace"), expected.encode()
    )


def reason_of(text: object) -> str:
    """Shorten a text of another node, which may be anything, for a line of ours."""
    return str(text)[:_LONGEST_REASON]
