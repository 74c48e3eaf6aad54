"""The ranks of this machine: started with the environment that DeepSpeed's launch.py gives them,
signalled, ended, counted.

They are our own children (docs/decisions/0013). A test holds what a rank is given here against what
the `deepspeed` command gives it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from framework.launch.hosts.devices import visible_variable
from framework.launch.hosts.topology import HostTopology
from framework.launch.options import KILL_SECONDS
from framework.system.limits import memory_groups
from framework.system.output import visible
from framework.system.parent_watch import AGENT_VARIABLE, REPORT_VARIABLE, identity

_LEFTOVER_GRACE_SECONDS: Final = 2.0
_CLEAR_SECONDS: Final = 10.0


@dataclass(frozen=True)
class RankEnd:
    """End of a rank: its number in the job, its exit code as a shell counts, and the line that
    explained it, if any.
    """

    rank: int
    code: int
    reason: str = ""


class Ranks:
    """One process per slot. Nothing runs before `start`.

    Attributes:
        asked: the first of them to say that it was asked to stop, and how.
    """

    def __init__(
        self,
        command: Sequence[str],
        topology: HostTopology,
        environment: Mapping[str, str],
        *,
        device: str = "cpu",
        devices: Sequence[int] | None = None,
    ) -> None:
        self._command = command
        self._topology = topology
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._give_up_at = math.inf
        numbers = range(topology.slots) if devices is None else sorted(devices)[: topology.slots]
        visible = {visible_variable(device): ",".join(map(str, numbers))}
        # A line fits into a pipe whole: every rank writes its own there, and none waits for the
        # agent to read.
        self._reasons: dict[int, str] = {}
        self.asked = ""
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        own = {AGENT_VARIABLE: identity(os.getpid()), REPORT_VARIABLE: str(self._write_end)}
        self._environment = {
            **environment,
            **visible,
            **own,
            "DSF_WORLD_SIZE": str(topology.world_size),
        }
        # torchrun's, from a shell inside its job: the ranks would read it before LOCAL_SIZE.
        self._environment.pop("LOCAL_WORLD_SIZE", None)

    def start(self) -> None:
        """Start all; after an OSError some may run."""
        for local_rank in range(self._topology.slots):
            environment = self._environment | rank_environment(self._topology, local_rank)
            # A session of its own: Ctrl-C reaches the agent only, so that each rank is asked once.
            self._running[int(environment["RANK"])] = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    self._command[0],
                    f"--local_rank={local_rank}",
                    *self._command[1:],
                ],
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                pass_fds=(self._write_end,),
            )

    @property
    def num_running(self) -> int:
        """Ranks that have not been seen to end."""
        return len(self._running)

    def poll(self) -> list[RankEnd]:
        """Return the ranks that ended since; all that ended meanwhile are in one answer."""
        if os.getpid() == 1:
            _reap_orphans({process.pid for process in self._running.values()})
        codes = {rank: process.poll() for rank, process in self._running.items()}
        self._read_reports()
        ended = [
            RankEnd(rank, 128 - code if code < 0 else code, self._reasons.get(rank, ""))
            for rank, code in codes.items()
            if code is not None
        ]
        for end in ended:
            del self._running[end.rank]
        return ended

    def _read_reports(self) -> None:
        with suppress(BlockingIOError):
            while text := os.read(self._read_end, 1 << 16):
                for line in text.decode(errors="replace").splitlines():
                    rank, _, reason = line.partition("\t")
                    if reason.startswith("\t"):
                        self.asked = self.asked or visible(f"{reason[1:]} to rank {rank}")
                    elif rank.isdecimal():
                        self._reasons.setdefault(int(rank), visible(reason))

    def signal(self, number: signal.Signals) -> None:
        """To every rank that runs."""
        if number == signal.SIGKILL:
            self._give_up_at = min(self._give_up_at, time.monotonic() + KILL_SECONDS)
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    @property
    def are_given_up(self) -> bool:
        """SIGKILL has not ended all of them for so long that it will not."""
        return time.monotonic() > self._give_up_at

    @property
    def not_killed(self) -> list[str]:
        """Ranks that SIGKILL did not end, with their process and its state, for people; after
        `clear`.
        """
        left = {
            rank: process.pid for rank, process in self._running.items() if process.poll() is None
        }
        return [f"rank {rank} (process {pid}, {_state(pid)})" for rank, pid in left.items()]

    def clear(self) -> None:
        """End whatever the ranks started and left: it carries this agent's id in its environment,
        wherever it is.
        """
        self.signal(signal.SIGKILL)
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._give_up_at - time.monotonic()))
        os.close(self._read_end)
        os.close(self._write_end)
        give_up_at = time.monotonic() + _CLEAR_SECONDS
        # What is asked to end may start another process meanwhile, so we look until there is none.
        ours = self._environment[AGENT_VARIABLE]
        stuck = {process.pid for process in self._running.values()}
        while left := [
            each
            for each in psutil.process_iter()
            if each.pid not in stuck and _has_agent(each, ours)
        ]:
            if time.monotonic() > give_up_at:
                return
            _end_all(left)


def rank_environment(topology: HostTopology, local_rank: int) -> dict[str, str]:
    """Return the variables that DeepSpeed 0.19.8's launch.py sets for a rank."""
    return {
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": str(topology.master_port),
        "WORLD_SIZE": str(topology.world_size),
        "RANK": str(topology.node_rank * topology.slots + local_rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(topology.slots),
        "CROSS_RANK": str(topology.node_rank),
        "CROSS_SIZE": str(topology.nnodes),
    }


def _state(pid: int) -> str:
    """The state of a process as the kernel has it, and in which of its functions the process
    sleeps, if that may be read.
    """
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        function = ""
        with suppress(OSError):
            function = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        return f"state {state}" + (f" in {function}" if function else "")
    return "state unknown"


def _has_agent(process: psutil.Process, agent: str) -> bool:
    try:
        return bool(process.pid != os.getpid() and process.environ().get(AGENT_VARIABLE) == agent)
    except (psutil.Error, OSError):
        return False


def _end_all(left: list[psutil.Process]) -> None:
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + _LEFTOVER_GRACE_SECONDS
    while any(map(_is_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        with suppress(psutil.Error):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    """A zombie is dead already; only its parent can do more for it."""
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _reap_orphans(ours: set[int]) -> None:
    """As process 1 of a container we are the parent of every orphan."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in ours:
            return  # a rank of ours is seen to by its own object; the rest waits for the next look
        with suppress(ChildProcessError):
            os.waitpid(found.si_pid, 0)


class OomKills:
    """Kills for lack of memory in this control group since this was made, as far as the kernel's
    count can be read.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        """Read the first of the files that has the counter: of version 2 (``memory.events``) or 1
        (``memory.oom_control``).
        """
        found = ((path, _read(path)) for path in (_counters() if counters is None else counters))
        self._path, self._before = next(
            ((path, count) for path, count in found if count is not None), (Path(), 0)
        )

    def have_risen(self) -> bool:
        """Return whether there has been one."""
        return (_read(self._path) or 0) > self._before


def _counters() -> list[Path]:
    """Inside a container the group is mounted as the root, whatever its name outside."""
    found = []
    for root, group, is_unified in memory_groups():
        name = "memory.events" if is_unified else "memory.oom_control"
        found += [root / group / name, root / name]
    return found


def _read(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        return next(
            (int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None
        )
    except (OSError, ValueError):
        return None
