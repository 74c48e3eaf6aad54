"""The ranks of this machine: processes with the environment that DeepSpeed's launch.py gives them.

They are children of this process (docs/decisions/0013). A test compares their environment with that
of ranks which the `deepspeed` command starts.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from pydantic import BaseModel, ConfigDict

from framework.hosts.devices import devices_of_ranks, visible_variable
from framework.hosts.topology import HostTopology
from framework.launch.options import KILL_SECONDS
from framework.system.json_lines import MessageReader
from framework.system.limits import control_groups
from framework.system.output import visible
from framework.system.parent_watch import AGENT_VARIABLE, REPORT_VARIABLE, identity

_LEFTOVER_GRACE_SECONDS: Final = 2.0
_CLEAR_SECONDS: Final = 10.0
_LARGEST_REPORT_BYTES: Final = 1 << 16


class RankReport(BaseModel):
    """A message of a rank.

    Attributes:
        reason: of its end.
        is_folder_lost: the run has lost its folder.
        asked: signal that requested it to stop.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    rank: int
    reason: str = ""
    is_folder_lost: bool = False
    asked: str = ""


@dataclass(frozen=True)
class RankEnd:
    """End of a rank.

    Attributes:
        rank: its number in the job.
        code: exit code, as a shell counts: 128 + N after signal N.
        reason: line that the rank reported about its end; empty if it did not.
        is_folder_lost: the rank reported that the run has lost its folder.
    """

    rank: int
    code: int
    reason: str = ""
    is_folder_lost: bool = False


class Ranks:
    """One process per slot. Nothing runs before `start`.

    Attributes:
        asked: signal and number of the first rank that reported a request to stop; empty before.
    """

    def __init__(
        self,
        command: Sequence[str],
        topology: HostTopology,
        environment: Mapping[str, str],
        *,
        device: str = "cpu",
        devices: Sequence[int] | None = None,
        processors: Sequence[frozenset[int]] = (),
    ) -> None:
        """Open the pipe of the ranks' reports, which `clear` closes.

        Args:
            command: the script, and its arguments.
            topology: of the job, as this node sees it.
            environment: of the ranks, without their own variables.
            device: kind of the devices.
            devices: their numbers; the lowest are used; None: from 0.
            processors: of each rank, to which it is bound; none: ranks have this process's.
        """
        self._command = command
        self._topology = topology
        self._processors = processors
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._give_up_at = math.inf
        numbers = devices_of_ranks(devices, topology.slots)
        # A pipe takes a line at once: every rank writes its own there, and none waits for the
        # agent to read.
        self._end_reports: dict[int, RankReport] = {}
        self.asked = ""
        self._read_end, self._write_end = os.pipe()
        self._reports = MessageReader(self._read_end, largest=_LARGEST_REPORT_BYTES)
        self._environment = dict(environment)
        self._environment[visible_variable(device)] = ",".join(map(str, numbers))
        self._environment[AGENT_VARIABLE] = identity(os.getpid())
        self._environment[REPORT_VARIABLE] = str(self._write_end)
        self._environment["DSF_WORLD_SIZE"] = str(topology.world_size)
        # torchrun sets it, if this runs in a shell inside its job: ranks would read it before
        # LOCAL_SIZE.
        self._environment.pop("LOCAL_WORLD_SIZE", None)

    def start(self) -> None:
        """Start all ranks; after an OSError some may run."""
        for local_rank in range(self._topology.slots):
            environment = self._environment | rank_environment(self._topology, local_rank)
            script, *arguments = self._command
            command = [sys.executable, "-u", script, f"--local_rank={local_rank}"]
            # A session of its own: Ctrl-C reaches the agent only, so that each rank gets one
            # request.
            with self._on_processors(local_rank):
                self._running[int(environment["RANK"])] = subprocess.Popen(
                    command + arguments,
                    env=environment,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(self._write_end,),
                )

    @contextmanager
    def _on_processors(self, local_rank: int) -> Iterator[None]:
        """Bind this thread to the processors of a rank for the time of the block.

        A process that it starts is bound like it, from the first page of memory on, and so are the
        workers that this process starts. Code between fork and exec could block: this process has
        threads.
        """
        if not self._processors:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._processors[local_rank])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    @property
    def num_running(self) -> int:
        """Number of ranks for which `poll` has returned no end."""
        return len(self._running)

    def poll(self) -> list[RankEnd]:
        """Return the ranks that have ended since the last call, and read the reports of all.

        As process 1 of a container, this also reaps orphans.
        """
        if os.getpid() == 1:
            _reap_orphans({process.pid for process in self._running.values()})
        codes = {rank: process.poll() for rank, process in self._running.items()}
        self._read_reports()
        ended = []
        for rank, code in codes.items():
            if code is not None:
                shell_code = 128 - code if code < 0 else code
                report = self._end_reports.get(rank, RankReport(rank=rank))
                reason = visible(report.reason)
                ended.append(RankEnd(rank, shell_code, reason, report.is_folder_lost))
                del self._running[rank]
        return ended

    def _read_reports(self) -> None:
        """Read the reports of ranks, without waiting.

        Other lines, which processes that ranks have started may write, are ignored.
        """
        while True:
            try:
                report = RankReport.model_validate(self._reports.receive(0))
            except TimeoutError:
                return
            except ValueError:  # of JSON, and pydantic's
                continue
            if report.asked:
                self.asked = self.asked or visible(f"{report.asked} to rank {report.rank}")
            elif report.reason:
                self._end_reports.setdefault(report.rank, report)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs; after SIGKILL `are_given_up` counts the time."""
        if number == signal.SIGKILL:
            self._give_up_at = min(self._give_up_at, time.monotonic() + KILL_SECONDS)
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def interrupt(self) -> None:
        """Send SIGINT to every rank that handles requests to stop, and SIGTERM to the others.

        A rank that is starting has nothing to save: SIGTERM ends it silently, and SIGINT with a
        traceback of Python, or even with Python's exit code 1.
        """
        for process in self._running.values():
            number = signal.SIGINT if _handles_requests(process.pid) else signal.SIGTERM
            with suppress(ProcessLookupError):
                process.send_signal(number)

    @property
    def are_given_up(self) -> bool:
        """True once a rank has survived SIGKILL for `KILL_SECONDS`."""
        return time.monotonic() > self._give_up_at

    @property
    def not_killed(self) -> list[str]:
        """Ranks that SIGKILL did not end, each with its process and state; valid after `clear`."""
        running = {rank: each for rank, each in self._running.items() if each.poll() is None}
        return [
            f"rank {rank} (process {process.pid}, {_state(process.pid)})"
            for rank, process in running.items()
        ]

    def clear(self) -> None:
        """Kill all ranks, and end all processes that they have started and left.

        Such a process has this agent's id in its environment, in any session. This blocks until
        they have ended, for `KILL_SECONDS` and `_CLEAR_SECONDS` at most.
        """
        self.signal(signal.SIGKILL)
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._give_up_at - time.monotonic()))
        os.close(self._read_end)
        os.close(self._write_end)
        give_up_at = time.monotonic() + _CLEAR_SECONDS
        # A process that is being ended may start another one, so this looks until there is none.
        agent = self._environment[AGENT_VARIABLE]
        stuck = {process.pid for process in self._running.values()}
        while left := _processes_of(agent, without=stuck):
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


def _handles_requests(pid: int) -> bool:
    """Return whether a process handles SIGTERM; True on systems without /proc."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        handled = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if handled is not None:
            return bool(int(handled[1], 16) >> (signal.SIGTERM - 1) & 1)
    return True


def _state(pid: int) -> str:
    """Describe a process: its state, and the kernel's function in which it sleeps if readable."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        function = ""
        with suppress(OSError):
            function = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        if function:
            return f"state {state} in {function}"
        return f"state {state}"
    return "state unknown"


def _processes_of(agent: str, *, without: set[int]) -> list[psutil.Process]:
    """Return the processes that have an agent's identity in their environment."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in without and _has_agent(process, agent)
    ]


def _has_agent(process: psutil.Process, agent: str) -> bool:
    try:
        return bool(process.pid != os.getpid() and process.environ().get(AGENT_VARIABLE) == agent)
    except (psutil.Error, OSError):
        return False


def _end_all(left: list[psutil.Process]) -> None:
    """Terminate processes, and kill the ones that have not ended within two seconds."""
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
    """Check whether a process runs; a zombie does not, and waits for its parent only."""
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _reap_orphans(ranks: set[int]) -> None:
    """Reap dead processes other than `ranks`: process 1 of a container gets every orphan."""
    # One look at the ranks takes 0.1 s, which many orphans must not delay.
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in ranks:
            return  # `Popen` reaps the rank; what is behind it waits for the next look
        with suppress(ChildProcessError):
            os.waitpid(dead.si_pid, 0)


class OomKills:
    """Kills for lack of memory in this control group since this was made.

    Where the kernel's count cannot be read, there are none.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        """Read the first of the files that has the counter.

        It is in ``memory.events`` of version 2, or in ``memory.oom_control`` of version 1.
        """
        self._path = Path()
        self._before = 0
        for path in _oom_counter_files() if counters is None else counters:
            count = _oom_count(path)
            if count is not None:
                self._path = path
                self._before = count
                break

    def have_risen(self) -> bool:
        """Check whether there has been such a kill."""
        return (_oom_count(self._path) or 0) > self._before


def _oom_counter_files() -> list[Path]:
    """Return the files that may have the kernel's count for this control group."""
    paths = []
    for root, group, is_unified in control_groups("memory"):
        name = "memory.events" if is_unified else "memory.oom_control"
        # inside a container the group is mounted as the root, and its name is that outside
        paths += [root / group / name, root / name]
    return paths


def _oom_count(path: Path) -> int | None:
    """Return the kills for lack of memory that a file has counted, or None."""
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == "oom_kill":
                return int(words[1])
    except (OSError, ValueError):
        pass
    return None
