"""The `ssh` processes of all hosts: what they say comes out with the name of the host, requests go in, and one exit
code comes of all their ends."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final, TextIO

from framework.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, ConfigError, Problem
from framework.launch.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.options import GRACE_SECONDS
from framework.launch.rendezvous.messages import readable
from framework.launch.stop_requests import StopRequests
from framework.system.output import write

_LOOK_SECONDS: Final = 0.2
_LARGEST_LINE_BYTES: Final = 1 << 16
# After the first host has ended for bad, the agents have ended the others within 20 s by themselves.
_WAIT_SECONDS: Final = 30.0
# What an agent has left behind there may hold the other end of its output.
_DRAIN_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 5.0
# Hosts that are told one by one when all is over.
_REPORTED: Final = 4


@dataclass(frozen=True)
class HostEnd:
    """End of a host's agent: the host's name, and the exit code."""

    host: str
    code: int


def job_code(ends: Sequence[HostEnd]) -> int:
    """The first that failed by itself; else that somebody was lost; else that it was stopped."""
    codes = [end.code for end in ends if end.code != EXIT_OK]
    causes = [code for code in codes if code not in (EXIT_STOPPED, EXIT_PEER_LOST)]
    lost = [code for code in codes if code == EXIT_PEER_LOST]
    return next(iter(causes or lost or codes), EXIT_OK)


def ends_reported(ends: Sequence[HostEnd]) -> str:
    """Describe the ends, the first one first; of many hosts those that ended alike together."""
    if len(ends) <= _REPORTED:
        return ", ".join(f"{end.host} ended with {end.code}" for end in ends)
    alike: dict[int, list[str]] = {}
    for end in ends:
        alike.setdefault(end.code, []).append(end.host)
    return ", ".join(f"{first_few(names)} ended with {code}" for code, names in alike.items())


class Agents:
    """The `ssh` processes of all hosts."""

    def __init__(
        self,
        commands: Sequence[tuple[str, Sequence[str]]],
        order: Mapping[str, object],
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Nothing is started yet.

        Args:
            commands: each host's name, for the lines that it says, and the `ssh` that starts its agent.
            order: what every agent is sent first.
            grace_seconds: what ranks have to save in after a request to stop.
        """
        self._commands = commands
        self._order = json.dumps(order).encode() + b"\n"
        # By node: two users of one host are two nodes.
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[IO[bytes], tuple[str, TextIO, bytearray]] = {}
        self._ends: list[HostEnd] = []
        self._reported = ""
        self._ended_badly = False
        self._give_up_at = math.inf
        self._drained_at = math.inf
        self._grace_seconds = grace_seconds

    def run(self) -> int:
        """Start them, hand on what they say and what is asked of them; returns the exit code of the job."""
        with StopRequests().handling_signals() as requests:
            try:
                self._start()
                while not self._is_over():
                    self._pass_on_output()
                    self._look_for_ends()
                    self._pass_on_request(requests)
            finally:
                self._let_go()
        code = job_code(self._ends)
        print_line(f"{ends_reported(self._ends)}; the job ends with {code}")
        return code

    def _is_over(self) -> bool:
        """All have ended, or were given the time for that: neither an ssh that hangs nor an output that stays open
        holds us.
        """
        now = time.monotonic()
        if self._running:
            return now > self._give_up_at
        self._drained_at = min(self._drained_at, now + _DRAIN_SECONDS)
        return not self._streams or now > self._drained_at

    def _start(self) -> None:
        for node, (name, command) in enumerate(self._commands):
            try:
                # A session of its own: Ctrl-C reaches this process only, and is told to the agents.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except FileNotFoundError:
                fix = "install OpenSSH's client, or start `launch node` on every host"
                raise ConfigError(Problem(kind="not-installed", reason="there is no ssh on PATH", fix=fix)) from None
            self._running[node] = process
            assert process.stdout is not None
            assert process.stderr is not None
            self._streams[process.stdout] = (name, sys.stdout, bytearray())
            self._streams[process.stderr] = (name, sys.stderr, bytearray())
            self._send_to(process, self._order)

    def _pass_on_output(self) -> None:
        if not self._streams:
            time.sleep(_LOOK_SECONDS)
            return
        for stream in readable(self._streams, _LOOK_SECONDS):
            name, out, kept = self._streams[stream]
            content = os.read(stream.fileno(), 1 << 16)
            kept += content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if not content or len(kept) > _LARGEST_LINE_BYTES:
                kept += b"\n" if kept else b""
            whole, _, rest = bytes(kept).rpartition(b"\n")
            if whole:
                lines = whole.decode("utf-8", errors="replace").split("\n")
                write(out, "".join(f"{name}: {line}\n" for line in lines if line))
            kept[:] = rest
            if not content:
                del self._streams[stream]
                stream.close()

    def _look_for_ends(self) -> None:
        for node, process in list(self._running.items()):
            code, name = process.poll(), self._commands[node][0]
            if code is None:
                continue
            del self._running[node]
            # 255 is ssh's own: not reached, refused, or cut off.
            if code == 255 or code < 0:
                print_line(f"{name}: ssh ended with {code}; the host was not reached, or was lost")
                code = EXIT_PEER_LOST
            self._ends.append(HostEnd(name, code))
            if code != EXIT_OK and not self._ended_badly:
                self._ended_badly = True
                # Agents that have met know already; those that still wait for this host do not.
                self._send_to_all(b"stop\n" if code == EXIT_STOPPED else b"lost\n")
                if not self._reported:
                    saving = self._grace_seconds if code == EXIT_STOPPED else 0.0
                    self._give_up_at = time.monotonic() + saving + _WAIT_SECONDS

    def _pass_on_request(self, requests: StopRequests) -> None:
        wish = "kill" if requests.insists else "stop" if requests.asked else ""
        if wish and wish != self._reported:
            self._reported = wish
            saving = self._grace_seconds if wish == "stop" else 0.0
            self._give_up_at = time.monotonic() + saving + _WAIT_SECONDS
            print_line(
                f"{requests.asked}: passing it on to {len(self._running)} hosts"
                + ("; once more kills" if wish == "stop" else "")
            )
            self._send_to_all(wish.encode() + b"\n")

    def _send_to_all(self, words: bytes) -> None:
        for process in self._running.values():
            self._send_to(process, words)

    def _send_to(self, process: subprocess.Popen[bytes], words: bytes) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(words)
            process.stdin.flush()

    def _let_go(self) -> None:
        """Close the life lines; an agent ends its ranks then, also one whose `ssh` hangs here."""
        for process in self._running.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for node, process in self._running.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._ends.append(HostEnd(self._commands[node][0], EXIT_PEER_LOST))
        for stream in self._streams:
            stream.close()
