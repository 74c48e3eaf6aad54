"""Channels between agents: one TCP connection, both ways, for the life of a job.

A message is a JSON object on a line. The other end may be any program that found the port, so lines
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, cast

from framework.system.json_lines import BadLineError, LineBuffer, decode, encode

PROTOCOL: Final = 5
LARGEST_LINE_BYTES: Final = 1 << 16  # a HELLO with the facts of a node is some kilobytes
_LARGEST_QUEUE_BYTES: Final = 1 << 20
_LARGEST_QUEUE: Final = 4096  # messages that have come and were not taken
_SIGNATURE_CHARACTERS: Final = 32
_LONGEST_REASON: Final = 200
_ENDLESS: Final = "it sends lines without an end"

Message = Mapping[str, Any]


class ConnectionLost(Exception):  # noqa: N818 - it is caught, not raised to a user
    """Error: the connection is of no use any more; its text is the reason."""


class NoAgent(ConnectionLost):
    """Error: the other end is no agent of this job."""


def foreign() -> NoAgent:
    """Return the error for a message that no agent of this release sends."""
    return NoAgent("it does not speak this protocol")


class Channel(asyncio.Protocol):
    """One connection. Messages that came before its end are received before the end is.

    Attributes:
        name: address of the other end, for messages.
        local_address: of this end.
        heard_at: `time.monotonic()` when data came last, or of its beginning.
    """

    def __init__(self, opened: Callable[[Channel], None] | None = None) -> None:
        """Prepare a connection; `opened`: called once it is connected, if a listener makes it."""
        self._opened = opened
        self._buffer = LineBuffer(largest=LARGEST_LINE_BYTES)
        # Signatures are checked in `receive`, not on arrival: the handshake may agree on keys in
        # between.
        self._lines = self._buffer.lines
        self._ended: ConnectionLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        # of what is sent, and of what is received
        self._keys: tuple[bytes, bytes] | None = None
        self._num_sent = 0
        self._num_received = 0
        self.name = ""
        self.local_address = ""
        self.heard_at = time.monotonic()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the addresses of both ends, and call `opened`."""
        self._transport = cast(asyncio.Transport, transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A dual-stack socket gives an IPv4 address in the form of IPv6, which no interface has.
        self.local_address = str(connection.getsockname()[0]).removeprefix("::ffff:")
        # it may be gone already
        self.name = str((transport.get_extra_info("peername") or ("",))[0])
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Split what came into lines, within the limits."""
        self.heard_at = time.monotonic()
        try:
            self._buffer.feed(data)
        except BadLineError:
            self._end(NoAgent(_ENDLESS))
        if len(self._lines) > _LARGEST_QUEUE:
            self._end(NoAgent(_ENDLESS))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Read the rest of the connection: a failed write ends it before everything was read."""
        with suppress(OSError, ValueError):
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
            with socket.socket(fileno=descriptor) as connection:
                connection.setblocking(False)
                while self._ended is None and (data := connection.recv(LARGEST_LINE_BYTES)):
                    self.data_received(data)
        reason = getattr(exc, "strerror", None)
        if not reason:
            reason = str(exc) if exc else "the connection was closed"
        self._end(ConnectionLost(reason))

    # What agents call.

    def sign(self, token: str, *, is_lead: bool, nonces: tuple[str, str]) -> None:
        """Sign and check every line from here on, if there is a token.

        Args:
            token: of the job.
            is_lead: whether this end is node 0.
            nonces: of node 0, and of the other node.
        """
        if token:
            key = _mac(token.encode(), "session", *nonces)
            lead = _mac(key, "lead")
            node = _mac(key, "node")
            self._keys = (lead, node) if is_lead else (node, lead)

    def send(self, kind: str, /, **content: Any) -> None:
        """Queue a message; raises ConnectionLost if the other end reads nothing.

        If the other end is gone, `receive` raises it.
        """
        self.send_body(body_of(kind, **content))

    def send_body(self, body: bytes) -> None:
        """Do the same with a message that `body_of` has made, perhaps for many channels."""
        if self._keys is not None:
            body = _signature(self._keys[0], self._num_sent, body) + body
            self._num_sent += 1
        if not self._transport.is_closing():
            self._transport.write(body + b"\n")
        if self._transport.get_write_buffer_size() > _LARGEST_QUEUE_BYTES:
            self._transport.abort()
            raise ConnectionLost("it reads nothing")

    async def receive(self) -> Message:
        """Wait for the next message; ConnectionLost if the other end is gone, or no agent."""
        while not self._lines:
            if self._ended is not None:
                raise self._ended
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        line = self._lines.popleft()
        try:
            if self._keys is not None:
                signature = line[:_SIGNATURE_CHARACTERS]
                line = line[_SIGNATURE_CHARACTERS:]
                expected = _signature(self._keys[1], self._num_received, line)
                if not hmac.compare_digest(signature, expected):
                    raise NoAgent("a message is not signed with the token of this job")
                self._num_received += 1
            return _parse(line)
        except NoAgent as wrong:
            self._lines.clear()
            self._end(wrong)
            raise

    def close(self) -> None:
        """Close the connection, after sending the queued messages if possible."""
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
        message = decode(line, largest=LARGEST_LINE_BYTES)
    except BadLineError:
        raise foreign() from None
    if not isinstance(message.get("type"), str):
        raise foreign()
    return message


def body_of(kind: str, /, **content: Any) -> bytes:
    """Return a message as it travels, without its signature."""
    return encode({"type": kind, **content})


def _mac(key: bytes, *texts: str) -> bytes:
    return hmac.digest(key, json.dumps(texts).encode(), "sha256")


def _signature(key: bytes, number: int, body: bytes) -> bytes:
    # The body is hashed by itself, so that signing a long message for a thousand nodes is cheap.
    signed = hmac.digest(key, number.to_bytes(8, "big") + hashlib.sha256(body).digest(), "sha256")
    return signed.hex()[:_SIGNATURE_CHARACTERS].encode()


def new_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(16)


def proof(token: str, *, role: str, nonces: tuple[str, str], content: Message) -> str:
    """Compute the proof that the sender knows the token, for this connection, role and content.

    Args:
        token: of the job.
        role: kind of the proof, so that none passes for another: ``node``, ``lead`` or ``nogo``.
        nonces: of node 0, and of the other node.
        content: that the proof covers.

    Returns:
        Hexadecimal digits; empty without a token.
    """
    if not token:
        return ""
    return _mac(token.encode(), role, *nonces, json.dumps(content, sort_keys=True)).hex()


def is_proof(received: object, expected: str) -> bool:
    """Compare two proofs in constant time."""
    if not isinstance(received, str):
        return False
    # JSON can also write half a surrogate, which UTF-8 cannot
    content = received.encode("utf-8", "backslashreplace")
    return hmac.compare_digest(content, expected.encode())


def reason_of(text: object) -> str:
    """Shorten a value that another node sent, which may be anything, to a text for the log."""
    return str(text)[:_LONGEST_REASON]
