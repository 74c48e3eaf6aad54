"""Agents of one job on this machine and their ends; processes that they leave end with the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.places import ROOT
from tests.ports import free_ports

HERE = Path(__file__).parent


class Members:
    """The agents of one job, each with ranks that run rank.py."""

    def __init__(self, folder: Path, *, nnodes: int = 2, slots: int = 1) -> None:
        self.folder, self.nnodes, self.slots = folder, nnodes, slots
        self.port = free_ports(2)
        self.processes: list[subprocess.Popen[str]] = []
        self.started_at = time.monotonic()

    def start(
        self,
        node_rank: int,
        *actions: str,
        facts: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        master_addr: str = "127.0.0.1",
        terms: dict[str, Any] | None = None,
        **topology: int,
    ) -> subprocess.Popen[str]:
        """Start an agent; `topology` and `terms` differ from the job's where given."""
        place = {
            "nnodes": self.nnodes,
            "slots": self.slots,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": self.port,
        } | topology
        given = {
            "topology": place,
            "facts": facts or {},
            "script": str(ROOT / "tests/launch/rank.py"),
            "arguments": [str(self.folder), *actions],
            "terms": {"port": self.port + 1, "grace_seconds": 30, "deadline_seconds": 60}
            | (terms or {}),
        }
        process = subprocess.Popen(
            [sys.executable, str(HERE / "member.py"), json.dumps(given)],
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            preexec_fn=restore_signals,
        )
        self.processes.append(process)
        return process

    def ready(self, num_ranks: int, *, timeout: float = 60) -> dict[int, dict[str, Any]]:
        """Return what the ranks wrote once they ran."""
        end = time.monotonic() + timeout
        while len(files := list(self.folder.glob("*.json"))) < num_ranks:
            assert time.monotonic() < end, (
                f"the ranks did not start: {[process.poll() for process in self.processes]}"
            )
            time.sleep(0.05)
        return {int(file.stem): json.loads(file.read_text()) for file in files}

    def signals(self, rank: int) -> list[str]:
        """Return the signals that a rank received."""
        return (self.folder / f"{rank}.signals").read_text().split()

    def close(self) -> None:
        """End the processes that are left, by process id."""
        for process in self.processes:
            process.kill()
        for file in self.folder.glob("*.json"):
            for pid in (json.loads(file.read_text())[name] for name in ("pid", "worker")):
                kill_what_is_left(pid, folder=self.folder)
        for process in self.processes:  # last: ranks and workers hold the other end of its stderr
            process.communicate()


def ended(process: subprocess.Popen[str], *, timeout: float = 60) -> tuple[int, str]:
    """Return the exit code of an agent, and its output."""
    stated = process.communicate(timeout=timeout)[1]
    return process.returncode, stated


def running(pid: int, *, folder: Path) -> bool:
    """Check whether the process runs and is one of this test's, not another of the same number."""
    try:
        process = psutil.Process(pid)
        return bool(str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_what_is_left(pid: int, *, folder: Path) -> None:
    """Send SIGKILL, if the process runs and is one of this test's."""
    if running(pid, folder=folder):
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)


def gone(pids: list[int], *, folder: Path, timeout: float = 20) -> bool:
    """Check whether all have ended, or do within the time."""
    end = time.monotonic() + timeout
    while any(running(pid, folder=folder) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def reset(connection: socket.socket) -> None:
    """End a connection as the death of a machine's process does: what comes after is refused."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def restore_signals() -> None:
    """Give signals their default effect: under nohup, and behind a shell's `&`, tests inherit
    ignored ones, and those stay ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
