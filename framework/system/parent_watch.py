"""No rank outlives its launcher: a thread checks twice a second whether the processes above this
one are still there.

They are the parent, if a launcher started this process as one of several ranks, and the agent above
the launcher, which ``DSF_AGENT=<process id>:<start time>`` names (the start time as in
/proc/<pid>/stat, because ids are used again). When one is gone, the rank ends at once: a save has
no name before it is complete, and the next start of the run needs the devices. Only a rank with a
request to stop, which may be saving, gets some seconds. (PR_SET_PDEATHSIG acts when the *thread*
that started this process ends, in a launcher that may live on, and leaves neither the line nor the
seconds.) Standard library only: train.py starts this before it imports anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from framework.errors import EXIT_PEER_LOST, EXIT_STOPPED, ConfigError

AGENT_VARIABLE: Final = "DSF_AGENT"
REPORT_VARIABLE: Final = "DSF_REPORT_FD"
FAILURES_VARIABLE: Final = "DSF_FAILURES"
_LONGEST_REPORT: Final = 600
_LOOK_SECONDS: Final = 0.5
_STOPPING_SECONDS: Final = 10.0
_DIE_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG
# Field 22 of /proc/<pid>/stat, in a list that begins with field 3: field 2, the name in
# parentheses, may contain spaces.
_START_TIME: Final = 22 - 3


def identity(pid: int) -> str:
    """Return ``<process id>:<start time>``, the value of DSF_AGENT for a process.

    The time is empty on systems without /proc. Raises ProcessLookupError if there is no such
    process.
    """
    try:
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].decode().split()
    except FileNotFoundError:
        os.kill(pid, 0)
        return f"{pid}:"
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)  # dead, and not reaped yet
    return f"{pid}:{fields[_START_TIME]}"


def watch_parent(
    environment: Mapping[str, str],
    *,
    is_stopping: Callable[[], bool],
    is_over: Callable[[], bool],
    stopping_seconds: float = _STOPPING_SECONDS,
) -> None:
    """Watch the launcher from now on, in a thread, if one started this process.

    Args:
        environment: of this process.
        is_stopping: whether the run has a request to stop, and may be saving.
        is_over: whether it has stopped and saved.
        stopping_seconds: how long a run that is stopping may go on alone.

    Raises:
        ConfigError: ``DSF_AGENT`` cannot be read.
    """
    if "LOCAL_RANK" in environment:
        parent = os.getppid()
    else:
        parent = None
    agent = _agent(environment)
    if parent is None and agent is None:
        return

    def watch() -> None:
        lost = _lost(parent, agent)
        while not lost:
            time.sleep(_LOOK_SECONDS)
            lost = _lost(parent, agent)
        deadline = time.monotonic() + stopping_seconds
        while is_stopping() and not is_over() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS / 5)
        with suppress(OSError):
            rank = environment.get("RANK", "0")
            line = f"rank {rank}: the {lost} is gone, and this rank ends with it [launcher-lost]"
            os.write(2, f"{line}\n".encode())
        os._exit(EXIT_STOPPED if is_over() else EXIT_PEER_LOST)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _lost(parent: int | None, agent: str | None) -> str:
    """Return which of the two processes is gone, for a message; empty: neither."""
    if parent is not None and os.getppid() != parent:
        return f"launcher (process {parent})"
    if agent is not None:
        pid = agent.partition(":")[0]
        try:
            is_there = identity(int(pid)) == agent
        except ProcessLookupError:
            is_there = False
        except OSError:
            # it may not be signalled, or the table of files is full: no reason to end
            is_there = True
        if not is_there:
            return f"agent (process {pid})"
    return ""


def _agent(environment: Mapping[str, str]) -> str | None:
    """Return the value of DSF_AGENT, or None without one; raises ConfigError if it is not valid."""
    text = environment.get(AGENT_VARIABLE)
    if not text:
        return None
    pid, colon, started = text.partition(":")
    if not (pid.isdecimal() and int(pid) and colon and (started.isdecimal() or not started)):
        reason = "not <process id>:<start time>"
        fix = "leave the variable to the launcher"
        raise ConfigError.of("agent-not-named", reason, fix, key=AGENT_VARIABLE, value=text)
    return text


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    That thread ends with the process `parent` at the latest. If the parent is gone already, this
    process ends now. Only Linux can do the first: on other systems only the second holds.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def report_end(line: str, *, is_folder_lost: bool = False) -> None:
    """Send the line that explains this rank's end to its agent, which shows it in its last line.

    `is_folder_lost`: the run has lost its folder, and a start from the beginning would train again.

    A process that a rank has started itself sends nothing: it has the variable, but not the pipe.
    """
    reason = " ".join(line.split())[:_LONGEST_REPORT]
    _report(reason=reason, is_folder_lost=is_folder_lost)


def record_failure(text: str) -> None:
    """Append the error that ends this process to the file that ``DSF_FAILURES`` names, for a
    command that has started the job and waits for it: in stderr, errors stand among other lines.
    """
    path = os.environ.get(FAILURES_VARIABLE)
    if path:
        from framework.system.json_lines import encode

        with suppress(OSError), Path(path).open("ab") as file:
            file.write(encode({"error": text}) + b"\n")


def report_asked(name: str) -> None:
    """Send the name of the signal that requests this rank to stop.

    Perhaps no other process got it, and a job that fails before that stop must not be restarted.
    """
    _report(asked=name)


def _report(**content: str | bool) -> None:
    """Write a message to the agent's pipe, if the agent is the parent of this process."""
    number = os.environ.get(REPORT_VARIABLE, "")
    if not number.isdecimal():
        return
    with suppress(OSError, ValueError):
        if identity(os.getppid()) != os.environ.get(AGENT_VARIABLE):
            return
        if stat.S_ISFIFO(os.fstat(int(number)).st_mode):
            from framework.system.json_lines import encode

            message = {"rank": int(os.environ.get("RANK", "0")), **content}
            os.write(int(number), encode(message) + b"\n")
