"""The writer, as a rank sees it: a process that is started once, given orders, and replaced when it has died."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import framework
from framework.checkpoint.channel import Channel

_ROOT: Final = str(Path(framework.__file__).resolve().parents[1])
_PROGRAM: Final = f"import sys; sys.path.insert(0, {_ROOT!r}); from framework.checkpoint.writer import main; main()"
_END_SECONDS: Final = 5.0


class WriterProcess:
    """One process; it is not forked, because forks of a process that drives a GPU do not work."""

    def __init__(self, memory: int) -> None:
        """Start it.

        Args:
            memory: descriptor of the memory in which the files will wait.

        Raises:
            OSError: the system starts no process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # -I: nothing in the current folder or in the environment takes the place of a module.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), str(theirs.fileno()), str(memory)],
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, **message: Any) -> None:
        """Give it an order, or a word.

        Raises:
            OSError: it has died.
        """
        self._channel.send(**message)

    def answer(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Its next answer; a failure where it has died.

        Raises:
            TimeoutError: none within `timeout` seconds.
        """
        answer = self._channel.receive(timeout)
        return answer if answer is not None else {"state": "dead", "failure": self._exit_reason()}

    def close(self) -> None:
        """End it: at once where it waits, or kill it."""
        self._channel.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exit_reason(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return f"the process that writes checkpoints {how}"
        return "the process that writes checkpoints has closed its channel"
