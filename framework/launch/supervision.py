"""Starts after a failure (`supervision.max_restarts`): a job that lost a rank, a host or its storage goes on by itself
from its newest sound checkpoint, and one that cannot get on is given up.

Each start is a job of its own, with new processes, ports and connections. Whether there is another one depends on what
failed and on whether anything was saved since (nvidia-resiliency-ext's restart policy, without its attribution):

asked to stop, configuration refused   no: its code
a new checkpoint since the last start  yes, at once
the same error at the same step again  no: 77, it would come a third time
three starts without a new checkpoint  no: 77
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.checkpoint.names import CHECKPOINTS, MANIFEST, named_folders
from framework.config.run_config import RunConfig
from framework.errors import (
    EXIT_CONFIG,
    EXIT_NO_PROGRESS,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TRAINING,
    EXIT_USAGE,
    counted,
)
from framework.launch.job import print_line, write_termination_log
from framework.launch.stop_requests import StopRequests

_FINAL: Final = (EXIT_OK, EXIT_STOPPED, EXIT_CONFIG, EXIT_USAGE, EXIT_NO_PROGRESS)
_OWN_ERRORS: Final = (EXIT_TRAINING, EXIT_STORAGE)
_MOST_IDLE: Final = 3
_LONGEST_WAIT_SECONDS: Final = 300.0
_VARIABLE: Final = re.compile(r"0x[0-9a-f]+|\d[\d,.:]*|; .* stopped.*$")


@dataclass(frozen=True)
class JobEnd:
    """End of one start: the exit code of the job, and the line that said what happened."""

    code: int
    line: str = ""

    @property
    def fingerprint(self) -> str:
        """The line without what differs between two ends of one cause: times, addresses, counts."""
        return _VARIABLE.sub("#", self.line)


def supervised(config: RunConfig, requests: StopRequests, start: Callable[[tuple[str, ...]], JobEnd]) -> int:
    """Start a job, and again as long as it makes sense; returns its exit code.

    Args:
        config: of the run; its folder is looked at, where this machine sees it.
        requests: to stop; heeded while this waits.
        start: runs the job once, with further settings of the run.
    """
    most, first = config.supervision.max_restarts, _Folder(config.run.folder)
    words: tuple[str, ...] = ()
    last, idle = JobEnd(EXIT_OK), 0
    for number in range(most + 1):
        step = first.newest_step()
        begun = time.time()
        end = start(words)
        if end.code in _FINAL or requests.asked or not most:
            return end.code
        has_saved = first.newest_step() > step
        idle = 0 if has_saved else idle + 1
        is_again = idle > 1 and end.code in _OWN_ERRORS and end.fingerprint == last.fingerprint
        last = end
        if why := _given_up(is_again=is_again, idle=idle, left=most - number, most=most):
            print_line(f"{why}; the job ends [no-restart]")
            write_termination_log(f"{end.line}; {why}")
            return end.code if number == most else EXIT_NO_PROGRESS
        seconds = 0.0 if has_saved else min(config.supervision.wait_seconds * 2 ** (idle - 1), _LONGEST_WAIT_SECONDS)
        # What was named for the first start holds until this run has saved something of its own.
        words = ("checkpoint.resume=auto",) if first.newest_step() >= 0 else ()
        goes_on = f"from step {first.newest_step()}" if words else "from the beginning"
        print_line(f"start {number + 2} of at most {most + 1}, {goes_on}, in {seconds:.0f} s [restart]")
        first.note(number + 1, end, begun=begun)
        requests.wait(seconds)
    raise AssertionError("the last start has returned")


def in_place(given: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line with further settings, in the place of what it says of the same keys."""
    keys = {word.partition("=")[0] for word in words}
    return (*(one for one in given if one.partition("=")[0] not in keys), *words)


def _given_up(*, is_again: bool, idle: int, left: int, most: int) -> str:
    if is_again:
        return "the same error at the same step again"
    if idle >= _MOST_IDLE:
        return f"{idle} starts in a row without a new checkpoint"
    return "" if left else f"{counted(most, 'restart')} used up (supervision.max_restarts)"


class _Folder:
    """Run folder, as the supervisor sees it: what was saved since it began to look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = self._saved()

    def newest_step(self) -> int:
        """The step of the newest checkpoint that was not there before; -1 where there is none."""
        return max((step for step, when in self._saved().items() if self._before.get(step) != when), default=-1)

    def note(self, number: int, end: JobEnd, *, begun: float) -> None:
        """Write the restart among the events of the run, which nobody else writes now."""
        event = {"time_seconds": round(time.time(), 3), "step": max(self.newest_step(), 0), "kind": "restart"}
        event |= {"number": number, "code": end.code, "cause": end.line, "seconds": round(time.time() - begun, 3)}
        with suppress(OSError), (self._path / "events.jsonl").open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            broken = file.read(1) not in (b"\n", b"")
            file.write(b"\n" * broken + json.dumps(event).encode() + b"\n")

    def _saved(self) -> dict[int, int]:
        """Step -> when its manifest was written, in nanoseconds."""
        found = {}
        with suppress(OSError):
            for step, path in named_folders(self._path / CHECKPOINTS):
                with suppress(OSError):
                    found[step] = (path / MANIFEST).stat().st_mtime_ns
        return found
