"""Messages between a rank and the process that writes its checkpoints: a line of JSON each, over a pair of sockets."""

from __future__ import annotations

import json
import math
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

_BLOCK: Final = 1 << 16


class Channel:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._read = end, b""
        self._poll = select.poll()  # `select.select` refuses descriptors above 1023, of which a rank may have many
        self._poll.register(end, select.POLLIN)

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            OSError: nobody is at the other end.
        """
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> Mapping[str, Any] | None:
        """The next message; None when the other end is gone.

        Raises:
            TimeoutError: none came within `timeout` seconds.
        """
        while b"\n" not in self._read:
            try:
                if not self._poll.poll(None if timeout is None else math.ceil(timeout * 1000)):
                    raise TimeoutError
                more = self._end.recv(_BLOCK)
            except ConnectionError:
                return None
            if not more:
                return None
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        message: Mapping[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """The other end sees the end, even where a forked child of this process still holds a copy of this one."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
