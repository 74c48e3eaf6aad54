"""Messages between processes: each is a JSON object on a line of a socket or a pipe.

The other end may be broken, or another program, so a line has a largest length, and anything but a
JSON object is an error. Nothing that is read is run. Standard library only: ranks, agents, writers
and their children use it.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

_BLOCK: Final = 1 << 16
_LARGEST_LINE_BYTES: Final = 1 << 28


class BadLineError(ValueError):
    """Error: the other end sent a line that is too long, or is no JSON object."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as it travels, without the end of its line."""
    # A half surrogate, which stands for a byte that is no UTF-8, becomes an escape of JSON.
    return json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")


def decode(line: bytes, *, largest: int = _LARGEST_LINE_BYTES) -> dict[str, Any]:
    """Return the message of a line. Raises BadLineError if there is none."""
    if len(line) > largest:
        raise BadLineError("the line is too long")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError("the line is not JSON") from error
    if not isinstance(message, dict):
        raise BadLineError("the line is no JSON object")
    return message


class LineBuffer:
    """Lines of data that comes in pieces.

    Attributes:
        lines: complete lines that were not taken yet, without their ends.
    """

    def __init__(self, *, largest: int = _LARGEST_LINE_BYTES) -> None:
        self._largest = largest
        self._rest = b""
        self.lines: deque[bytes] = deque()

    def feed(self, data: bytes) -> None:
        """Add data. Raises BadLineError if a line without an end is too long; it is dropped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += lines
        if len(self._rest) > self._largest:
            self._rest = b""
            raise BadLineError("a line without an end is too long")


class MessageReader:
    """Messages that come over a pipe or a socket."""

    def __init__(self, descriptor: int, *, largest: int = _LARGEST_LINE_BYTES) -> None:
        """Read from an open descriptor, which stays its owner's."""
        self._descriptor = descriptor
        self._largest = largest
        self._buffer = LineBuffer(largest=largest)
        # `select.select` refuses descriptors above 1023, and a rank may have many of them
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next message, and return it.

        Args:
            timeout: seconds to wait; None: without a limit.

        Returns:
            None if the other end is closed.

        Raises:
            TimeoutError: no message has come.
            BadLineError: a line has come that is no message; the next call reads on after it.
        """
        milliseconds = None if timeout is None else math.ceil(timeout * 1000)
        while not self._buffer.lines:
            try:
                if not self._poll.poll(milliseconds):
                    raise TimeoutError
                data = self._read()
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer.feed(data)
        return decode(self._buffer.lines.popleft(), largest=self._largest)

    def _read(self) -> bytes:
        return os.read(self._descriptor, _BLOCK)


class MessageSocket(MessageReader):
    """One end of a pair of sockets between two processes."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end.fileno())
        self._end = end

    def _read(self) -> bytes:
        # not by its descriptor, which is another file's once this end is closed
        return self._end.recv(_BLOCK)

    def send(self, **message: Any) -> None:
        """Send a message; raises OSError if the other end is closed."""
        self._end.sendall(encode(message) + b"\n")

    def close(self) -> None:
        """Close the connection for the other end as well.

        That works even if a forked child of this process still holds a copy of this end.
        """
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
