"""`Remote`: the preflight's member on one host, started through ssh and asked in lines of JSON."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from framework.doctor.member import ANSWER
from framework.launch.environment import ROOT
from framework.launch.hosts.hostfile import Host
from framework.launch.ssh import passed_on

_ASK_SECONDS: Final = 40.0
_CONNECT_SECONDS: Final = 10


class HostFailed(Exception):  # noqa: N818 - it is told, and never leaves this module
    """A host did not answer; the text says why."""


class Remote:
    """The member on one host."""

    def __init__(self, host: Host, command: Sequence[str], *, address: str = "") -> None:
        self.host, self.name = host, host.name.rpartition("@")[2]
        self.address = address
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends them by their stdin, after they have cleaned up
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._stderr: list[str] = []
        self._errors = threading.Thread(target=self._keep_errors, daemon=True)
        self._errors.start()
        threading.Thread(target=self._keep_answers, daemon=True).start()

    def ask(self, order: Mapping[str, Any], *, seconds: float = _ASK_SECONDS) -> dict[str, Any]:
        """Send an order and wait for its answer.

        Raises:
            HostFailed: there is none.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise HostFailed(f"no answer within {seconds:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            code = self._process.wait()
            self._errors.join(1)
            last = next((each.strip() for each in reversed(self._stderr) if each.strip()), "it said nothing")
            raise HostFailed(f"ssh ended with {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it clean up, and end it where it does not."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _keep_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(None)

    def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(self._process.stderr)


def member_command(host: Host, *, ssh_args: Sequence[str] = ()) -> list[str]:
    """Starts the member: same Python, same folder, as DeepSpeed's launcher expects them; words are quoted for the shell
    there.
    """
    path = [f"PYTHONPATH={ROOT}"] if (ROOT / "pyproject.toml").is_file() else []
    words = ["env", *path, sys.executable, "-m", "framework.doctor.member"]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
    own = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "-T"]
    return ["ssh", *ssh_args, *own, "--", host.name, there]  # of two values ssh takes the first


def variables() -> dict[str, str]:
    """What `launch` gives to the hosts, of the environment here; sent over stdin, where nobody sees it."""
    return passed_on(os.environ, exports=())


def each_of(remotes: Sequence[Remote], do: Callable[[Remote], Any]) -> list[Any]:
    """What `do` returns for each, all at the same time; the first exception is raised after all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(remotes)))) as pool:
        return list(pool.map(do, remotes))
