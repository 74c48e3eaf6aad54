"""A child process that gets work in messages, and ends when this process does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

import framework
from framework.system.json_lines import MessageSocket
from framework.system.parent_watch import die_with
from framework.system.stopping import SIGNALS

_END_SECONDS: Final = 5.0
_ROOT: Final = str(Path(framework.__file__).resolve().parents[1])


class Child(MessageSocket):
    """A child process, as seen by its parent.

    It is not forked, because forks of a process that drives a GPU do not work.
    """

    def __init__(
        self,
        target: str,
        *words: str,
        descriptors: Sequence[int] = (),
        path: Sequence[str] = (_ROOT,),
    ) -> None:
        """Start the process; raises OSError if that fails.

        Args:
            target: ``module:function`` that it calls with its end of the connection and `words`.
            words: further arguments of the function.
            descriptors: files of this process that the child keeps open.
            path: folders that its modules come from, before Python's own.
        """
        near_end, far_end = socket.socketpair()
        program = (
            f"import sys; sys.path[:0] = {list(path)!r}; from framework.system.child import "
            "main; main()"
        )
        # -I: no file in the current folder, and no variable, can replace a module.
        command = [sys.executable, "-I", "-c", program]
        command += [str(os.getpid()), str(far_end.fileno()), target]
        command += words
        with far_end:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(far_end.fileno(), *descriptors),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError:
                near_end.close()
                raise
        super().__init__(near_end)
        self.pid = self._process.pid

    def close(self) -> None:
        """Close the connection and wait for the process's end; kill it after five seconds.

        A child that waits for a message ends by itself.
        """
        super().close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def exit_reason(self) -> str:
        """Wait up to five seconds for the end, and return how the process ended, as the rest of a
        sentence.
        """
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            if code < 0:
                return f"was killed by signal {-code}"
            return f"ended with code {code}"
        return "has closed its channel"


def main() -> None:
    """Run, in the child process, the function that `Child` has put on its command line.

    Signals to the whole process group, which request a stop, are left to the parent.
    """
    parent, channel, target, *words = sys.argv[1:]
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # If the kernel does not end this process with its parent, the end of the connection does.
    die_with(int(parent))
    module, _, name = target.partition(":")
    with suppress(ConnectionError):  # the parent has ended while this sent a message
        getattr(import_module(module), name)(
            MessageSocket(socket.socket(fileno=int(channel))), *words
        )
