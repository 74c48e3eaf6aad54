"""A process beside this one that it gives work to, in messages; it ends when this one does."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import framework
from framework.system.parent_watch import die_with
from framework.system.stopping import SIGNALS

_BLOCK: Final = 1 << 16
_END_SECONDS: Final = 5.0
_ROOT: Final = str(Path(framework.__file__).resolve().parents[1])


class MessageSocket:
    """One end of a pair of sockets between two processes: each message is a line of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._read = b""
        # `select.select` refuses descriptors above 1023, of which a rank may have many
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, **message: Any) -> None:
        """Send a message; raises OSError where nobody is at the other end."""
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> Mapping[str, Any] | None:
        """The next message, None when the other end is gone; raises TimeoutError if none comes in
        so many seconds.
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
        return dict(json.loads(line))

    def close(self) -> None:
        """The other end sees the end, even where a forked child of this process still holds a copy
        of this one.
        """
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Child(MessageSocket):
    """The process, as the one that started it sees it.

    It is not forked, because forks of a process that drives a GPU do not work.
    """

    def __init__(
        self,
        target: str,
        *words: str,
        descriptors: Sequence[int] = (),
        path: Sequence[str] = (_ROOT,),
    ) -> None:
        """Start it; raises OSError if that fails.

        Args:
            target: ``module:function`` that it calls with its end of the channel, and with `words`.
            descriptors: files of this process that it keeps open.
            path: folders that its modules come from, before Python's own.
        """
        ours, theirs = socket.socketpair()
        program = (
            f"import sys; sys.path[:0] = {[*path]!r}; from framework.system.child import "
            "main; main()"
        )
        with theirs:
            try:
                # -I: nothing in the current folder or in the environment takes the place of a
                # module.
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-c",
                        program,
                        str(os.getpid()),
                        str(theirs.fileno()),
                        target,
                        *words,
                    ],
                    pass_fds=(theirs.fileno(), *descriptors),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        super().__init__(ours)
        self.pid = self._process.pid

    def close(self) -> None:
        """End it: at once where it waits, or kill it."""
        super().close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def exit_reason(self) -> str:
        """Return how it ended, as the rest of a sentence."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            if code < 0:
                return f"was killed by signal {-code}"
            return f"ended with code {code}"
        return "has closed its channel"


def main() -> None:
    """Do what a `Child` was started for. What asks the whole process group to stop is its parent's
    business.
    """
    parent, channel, target, *words = sys.argv[1:]
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Where the kernel does not end it, the end of the channel does.
    die_with(int(parent))
    module, _, name = target.partition(":")
    with suppress(ConnectionError):  # the parent has gone while it was being told
        getattr(import_module(module), name)(
            MessageSocket(socket.socket(fileno=int(channel))), *words
        )
