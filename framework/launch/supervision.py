"""Starts after a failure (`supervision.max_restarts`).

A job that lost a rank, a host or its storage goes on by itself from its newest sound checkpoint. A
job that makes no progress is given up.

Each start is a job of its own, with new processes, ports and connections. Whether there is another
one depends on the failure, and on whether anything was saved since (nvidia-resiliency-ext's restart
policy, without its attribution):

request to stop, refused configuration  no: its code
a new checkpoint since the last start   yes, at once
the checkpoints are gone                no: 74, it would train from the beginning again
the same error at the same step again   no: 77, it would come a third time
three starts without a new checkpoint   no: 77
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

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
from framework.system.files import open_own

HOST_LOST: Final = 255
"""Exit code of an agent that leaves a job which may go on without its host, and of `ssh` itself
where it does not reach a host, or loses it."""
_LOOK_SECONDS: Final = 5.0
_FINAL: Final = (EXIT_OK, EXIT_STOPPED, EXIT_CONFIG, EXIT_USAGE, EXIT_NO_PROGRESS)
_OWN_ERRORS: Final = (EXIT_TRAINING, EXIT_STORAGE)
_MOST_IDLE: Final = 3
_MOST_COUNTED: Final = 1 << 20  # of starts that another node may report
_LONGEST_LAST: Final = 1000  # of a fingerprint: it travels on the line of GO
_RESUME: Final = "checkpoint.resume=auto"
_LONGEST_WAIT_SECONDS: Final = 300.0
# Addresses, and all numbers but that of the step.
_VARIABLE: Final = re.compile(r"0x[0-9a-f]+|(?<!step )(?<![\d,.:])\d[\d,.:]*")


@dataclass(frozen=True)
class JobEnd:
    """End of one start.

    Attributes:
        code: exit code of the job.
        line: describes the end.
        cause: the part of the line about the first failure.
        is_folder_lost: the run has lost its folder.
        has_left: this node leaves the job, which may go on without it.
    """

    code: int
    line: str = ""
    cause: str = ""
    is_folder_lost: bool = False
    has_left: bool = False

    @property
    def fingerprint(self) -> str:
        """The cause without its times, addresses and counts, but with the step.

        Two ends of one cause have the same fingerprint.
        """
        return _VARIABLE.sub("#", self.cause)[:_LONGEST_LAST]


@dataclass(frozen=True)
class NextStart:
    """Another start, after `seconds`, with the reason `why` for the log."""

    seconds: float
    why: str


def _check_fingerprint(text: str) -> str:
    if len(text) > _LONGEST_LAST:
        raise ValueError("the fingerprint is too long")
    return text


_Count = Annotated[int, Field(ge=0, le=_MOST_COUNTED)]


class RestartState(BaseModel):
    """What another machine needs to know of the restarts, as `Restarts.state` has it.

    Attributes:
        number: starts after the first.
        idle: starts in a row that saved no new checkpoint.
        last: fingerprint of the last end.
        resumes: see `Restarts`.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    number: _Count
    idle: _Count
    last: Annotated[str, AfterValidator(_check_fingerprint)]
    resumes: bool


class Restarts:
    """Decision after every start of a job whether there is another one.

    Attributes:
        most: starts after the first that are allowed.
        resumes: the next start goes on from what this job has saved.
        code: exit code of the job, once there is no other start.
    """

    def __init__(self, config: RunConfig) -> None:
        """Read the state of the run folder, if this machine has it; the first start begins now."""
        self.most = config.supervision.max_restarts
        self._wait_seconds = config.supervision.wait_seconds
        self._folder = _Folder(config.run.folder, goes_on=config.checkpoint.resume == "auto")
        self._number = 0
        self._num_idle = 0
        self._last_fingerprint = ""
        self.resumes = False
        self.code = EXIT_OK
        self.begin()

    @property
    def state(self) -> dict[str, Any]:
        """State that another machine needs to go on deciding."""
        return {
            "number": self._number,
            "idle": self._num_idle,
            "last": self._last_fingerprint,
            "resumes": self.resumes,
        }

    def restore(self, state: object) -> None:
        """Take the state that a node kept while node 0 was replaced, if it is ahead of this one."""
        try:
            known = RestartState.model_validate(state)
        except ValidationError:  # or the state is empty: that node has no restarts
            return
        if known.number > self._number:
            self._number = known.number
            self._num_idle = known.idle
            self._last_fingerprint = known.last
            self.resumes = known.resumes

    def state_after_losses(self, count: int) -> dict[str, Any]:
        """Return the state for the agent of a host that was lost `count` times.

        The agents of the other hosts may know more: `restore` takes what is ahead.
        """
        self.resumes = self.resumes or self._folder.newest_step() >= 0
        return {"number": count, "idle": 0, "last": "", "resumes": self.resumes}

    def begin(self) -> None:
        """Note what is saved when a start begins, and begin to watch what it saves."""
        self._step = self._folder.newest_step()
        self._begun = time.time()
        self._folder.watch()

    @property
    def number(self) -> int:
        """Starts after the first."""
        return self._number

    @property
    def used_up(self) -> str:
        """Why there is no other start after the loss of node 0; empty if there may be one."""
        gone = self._folder.gone
        if gone:
            return gone
        if self._num_idle >= _MOST_IDLE or self._number > self.most:
            reason = _reason_to_give_up(
                is_same_error=False, idle=self._num_idle, left=0, most=self.most
            )
            return f"node 0 was lost: {reason}"
        return ""

    def count_lost(self) -> None:
        """Count a start that lost its node 0; this other node sends `state` to the next node 0."""
        self._note_saved()
        self._number += 1

    def _note_saved(self) -> int:
        """Note what the start has saved; return the step of its newest checkpoint, or -1.

        A start without a new checkpoint is counted as idle.
        """
        newest = self._folder.newest_step()
        if newest > self._step:
            self._num_idle = 0
        else:
            self._num_idle += 1
        # The checkpoint named for the first start holds until this run has saved one of its own.
        self.resumes = self.resumes or newest >= 0
        return newest

    def after(self, end: JobEnd, *, is_asked: bool = False) -> NextStart | None:
        """Decide about another start, and log the decision.

        Args:
            end: of the last start.
            is_asked: whether it ended because of a request to stop.

        Returns:
            None if there is no other start: `code` is then the exit code of the job.
        """
        self.code = end.code
        if end.code in _FINAL or is_asked or not self.most:
            return None
        self._folder.stop_watching()
        newest = self._note_saved()
        if end.is_folder_lost:
            self._folder.note_lost()
        gone = self._folder.gone
        if gone:
            print_line(f"{gone}; the job ends [no-restart]")
            write_termination_log(f"{end.line}; {gone}")
            self.code = EXIT_STORAGE
            return None
        is_same_error = (
            self._num_idle > 1
            and end.code in _OWN_ERRORS
            and end.fingerprint == self._last_fingerprint
        )
        self._last_fingerprint = end.fingerprint
        reason = _reason_to_give_up(
            is_same_error=is_same_error,
            idle=self._num_idle,
            left=self.most - self._number,
            most=self.most,
        )
        if reason:
            print_line(f"{reason}; the job ends [no-restart]")
            write_termination_log(f"{end.line}; {reason}")
            self.code = end.code if self._number == self.most else EXIT_NO_PROGRESS
            return None
        return self._next_start(end, newest)

    def _next_start(self, end: JobEnd, newest: int) -> NextStart:
        """Count another start, log it, and write it among the events of the run."""
        if self._num_idle:
            seconds = min(self._wait_seconds * 2 ** (self._num_idle - 1), _LONGEST_WAIT_SECONDS)
        else:
            seconds = 0.0
        if newest >= 0:
            goes_on = f"from step {newest}"
        elif self.resumes:
            goes_on = "from its checkpoint"
        else:
            goes_on = "from the beginning"
        self._number += 1
        why = (
            f"start {self._number + 1} of at most {self.most + 1}, {goes_on}, in {seconds:.0f} "
            "s [restart]"
        )
        print_line(why)
        self._folder.note(self._number, end, begun=self._begun)
        return NextStart(seconds, why)


def further_settings(*, resumes: bool) -> tuple[str, ...]:
    """Return the settings that a later start of a job adds; another node can cause no others."""
    return (_RESUME,) if resumes else ()


def is_final(code: int) -> bool:
    """Check whether no other start ever follows this exit code."""
    return code in _FINAL


def in_place(arguments: Sequence[str], settings: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with further settings, which replace those with the same keys."""
    keys = {setting.partition("=")[0] for setting in settings}
    others = [word for word in arguments if word.partition("=")[0] not in keys]
    return (*others, *settings)


def _reason_to_give_up(*, is_same_error: bool, idle: int, left: int, most: int) -> str:
    """Return why there is no other start; empty if there is one.

    Args:
        is_same_error: the last two starts ended with the same error, and saved nothing.
        idle: starts in a row without a new checkpoint.
        left: restarts that are still allowed.
        most: restarts that are allowed in all.
    """
    if is_same_error:
        return "the same error at the same step again"
    if idle >= _MOST_IDLE:
        return f"{idle} starts in a row without a new checkpoint"
    if left:
        return ""
    return f"{counted(most, 'restart')} used up (supervision.max_restarts)"


class _Folder:
    """Run folder, as the supervisor sees it: what was saved since this was made."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        """Read the folder; `goes_on`: the job resumes from a checkpoint that is there already."""
        self._path = path
        self._before = self._saved() or {}  # time of each step's manifest
        # step of the newest checkpoint that the job has, or has had; -1 if there was none
        if goes_on:
            self._seen = max(self._before, default=-1)
        else:
            self._seen = -1
        self._is_lost = False
        self._watch_is_over = threading.Event()
        self._events_before = (0, 0)  # inode and size of the file
        with suppress(OSError):
            status = (path / "events.jsonl").stat()
            self._events_before = (status.st_ino, status.st_size)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint that was not there before, or -1."""
        saved = self._saved() or {}
        new = [step for step, when in saved.items() if self._before.get(step) != when]
        newest = max(new, default=-1)
        if newest > self._seen:  # a watch that began earlier may find nothing at the same time
            self._seen = newest
        return newest

    def watch(self) -> None:
        """Read the folder every few seconds from now on.

        A folder that is moved away later no longer shows that something was saved.
        """
        self._watch_is_over.set()
        self._watch_is_over = threading.Event()
        threading.Thread(target=self._watch, args=(self._watch_is_over,), daemon=True).start()

    def stop_watching(self) -> None:
        """End what `watch` began."""
        self._watch_is_over.set()

    def _watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(_LOOK_SECONDS):
            self.newest_step()

    def note_lost(self) -> None:
        """Note that the run has lost its folder."""
        self._is_lost = True

    @property
    def gone(self) -> str:
        """Description of checkpoints that are no longer there; empty if there is nothing lost."""
        saved = self._saved()
        if saved or saved is None:
            return ""
        fix = "put them back under its name, and start with checkpoint.resume=auto"
        if self._seen >= 0:
            return f"{self._path}: its checkpoints, up to step {self._seen}, are gone; {fix}"
        if self._is_lost or self._has_saved():
            return f"{self._path}: the checkpoints that it held are gone; {fix}"
        return ""

    def _has_saved(self) -> bool:
        """Check whether the events of this job contain the save of a checkpoint."""
        with suppress(OSError), open_own(self._path / "events.jsonl", "rb") as file:
            inode, size = self._events_before
            if os.fstat(file.fileno()).st_ino == inode:
                file.seek(size)
            return any(b'"kind": "save"' in line for line in file)
        return False

    def note(self, number: int, end: JobEnd, *, begun: float) -> None:
        """Write the restart among the events of the run; no other process writes them now."""
        event = {
            "time_seconds": round(time.time(), 3),
            "step": max(self.newest_step(), 0),
            "kind": "restart",
            "number": number,
            "code": end.code,
            "cause": end.line,
            "seconds": round(time.time() - begun, 3),
        }
        line = json.dumps(event).encode() + b"\n"
        with suppress(OSError), (self._path / "events.jsonl").open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"\n", b""):  # the last line was not written to its end
                line = b"\n" + line
            file.write(line)

    def _saved(self) -> dict[int, int] | None:
        """Return the time of each step's manifest in nanoseconds, or None if storage fails."""
        times = {}
        try:
            for step, path in named_folders(self._path / CHECKPOINTS):
                with suppress(FileNotFoundError):
                    times[step] = (path / MANIFEST).stat().st_mtime_ns
        except OSError:
            return None
        return times
