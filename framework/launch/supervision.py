"""Starts after a failure (`supervision.max_restarts`): a job that lost a rank, a host or its
storage goes on by itself from its newest sound checkpoint, and one that cannot get on is given up.

Each start is a job of its own, with new processes, ports and connections. Whether there is another
one depends on what failed and on whether anything was saved since (nvidia-resiliency-ext's restart
policy, without its attribution):

asked to stop, configuration refused   no: its code
a new checkpoint since the last start  yes, at once
the checkpoints are gone               no: 74, it would train again what was trained
the same error at the same step again  no: 77, it would come a third time
three starts without a new checkpoint  no: 77
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
from framework.system.files import open_own

_LOST: Final = "[run-folder-lost]"
_LOOK_SECONDS: Final = 5.0
# ends the line of a job that failed after it was asked to stop, wherever that was
_ASKED: Final = "[stop-asked]"
_FINAL: Final = (EXIT_OK, EXIT_STOPPED, EXIT_CONFIG, EXIT_USAGE, EXIT_NO_PROGRESS)
_OWN_ERRORS: Final = (EXIT_TRAINING, EXIT_STORAGE)
_MOST_IDLE: Final = 3
_STATE: Final[Mapping[str, type]] = {"number": int, "idle": int, "last": str, "resumes": bool}
_MOST_COUNTED: Final = 1 << 20  # of starts that another node may report
_LONGEST_LAST: Final = 1000  # of a fingerprint: it travels on the line of GO
_RESUME: Final = "checkpoint.resume=auto"
_LONGEST_WAIT_SECONDS: Final = 300.0
_VARIABLE: Final = re.compile(r"0x[0-9a-f]+|(?<!step )(?<![\d,.:])\d[\d,.:]*|; .* stopped.*$")


@dataclass(frozen=True)
class JobEnd:
    """End of one start: the exit code of the job, and the line that said what happened."""

    code: int
    line: str = ""

    @property
    def fingerprint(self) -> str:
        """The line without what differs between two ends of one cause: times, addresses, counts;
        not the step.
        """
        return _VARIABLE.sub("#", self.line)[:_LONGEST_LAST]


@dataclass(frozen=True)
class Again:
    """Another start, after so many seconds; `why`: in words."""

    seconds: float
    why: str


class Restarts:
    """Decision after every start of a job whether there is another one.

    Attributes:
        resumes: the next start goes on from what this job has saved.
        code: exit code of the job, once there is no other start.
    """

    def __init__(self, config: RunConfig) -> None:
        """Look at the folder of the run, where this machine sees it; the first start begins now."""
        self._most = config.supervision.max_restarts
        self._wait_seconds = config.supervision.wait_seconds
        self._folder = _Folder(config.run.folder, goes_on=config.checkpoint.resume == "auto")
        self._number = self._idle = 0
        self._last = ""
        self.resumes = False
        self.code = EXIT_OK
        self.begin()

    @property
    def state(self) -> dict[str, Any]:
        """State that another machine needs to go on deciding."""
        return {
            "number": self._number,
            "idle": self._idle,
            "last": self._last,
            "resumes": self.resumes,
        }

    @property
    def words(self) -> tuple[str, ...]:
        """Further settings of the run for the next start."""
        return further_settings(resumes=self.resumes)

    def restore(self, state: object) -> None:
        """Take the state that a node kept while node 0 was replaced; the furthest of all counts."""
        if isinstance(state, dict) and state and is_state(state) and self._number < state["number"]:
            self._number, self._idle, self._last = (
                state[name] for name in ("number", "idle", "last")
            )
            self.resumes = state["resumes"]

    def begin(self) -> None:
        """Note what is saved when a start begins, and look at what it saves."""
        self._step = self._folder.newest_step()
        self._begun = time.time()
        self._folder.look()

    @property
    def number(self) -> int:
        """Starts after the first."""
        return self._number

    @property
    def used_up(self) -> str:
        """Say why there is no other start, where node 0 was lost; empty where there is one."""
        gone = self._folder.gone
        if gone:
            return gone
        if self._idle >= _MOST_IDLE or self._number > self._most:
            return (
                "node 0 was lost: "
                f"{_given_up(is_again=False, idle=self._idle, left=0, most=self._most)}"
            )
        return ""

    def count_lost(self) -> None:
        """Count a start whose node 0 was lost, on another node: the node 0 to come is told."""
        self._note_saved()
        self._number += 1

    def _note_saved(self) -> int:
        """Count a start that saved nothing, and note whether the next one has a checkpoint; returns
        the newest step.
        """
        newest = self._folder.newest_step()
        self._idle = 0 if newest > self._step else self._idle + 1
        # What was named for the first start holds until this run has saved something of its own.
        self.resumes = self.resumes or newest >= 0
        return newest

    def after(self, end: JobEnd, *, is_asked: bool = False) -> Again | None:
        """Decide, and log it; `is_asked`: somebody asked for the end."""
        self.code = end.code
        if end.code in _FINAL or is_asked or end.line.endswith(_ASKED) or not self._most:
            return None
        self._folder.look_no_more()
        newest = self._note_saved()
        if _LOST in end.line:
            self._folder.note_lost()
        gone = self._folder.gone
        if gone:
            print_line(f"{gone}; the job ends [no-restart]")
            write_termination_log(f"{end.line}; {gone}")
            self.code = EXIT_STORAGE
            return None
        is_again = self._idle > 1 and end.code in _OWN_ERRORS and end.fingerprint == self._last
        self._last = end.fingerprint
        why = _given_up(
            is_again=is_again, idle=self._idle, left=self._most - self._number, most=self._most
        )
        if why:
            print_line(f"{why}; the job ends [no-restart]")
            write_termination_log(f"{end.line}; {why}")
            self.code = end.code if self._number == self._most else EXIT_NO_PROGRESS
            return None
        longest = _LONGEST_WAIT_SECONDS
        if self._idle:
            seconds = min(self._wait_seconds * 2 ** (self._idle - 1), longest)
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
            f"start {self._number + 1} of at most {self._most + 1}, {goes_on}, in {seconds:.0f} "
            "s [restart]"
        )
        print_line(why)
        self._folder.note(self._number, end, begun=self._begun)
        return Again(seconds, why)


def supervised(
    config: RunConfig, requests: StopRequests, start: Callable[[tuple[str, ...]], JobEnd]
) -> int:
    """Start a job, and again as long as it makes sense, with further settings of the run; returns
    its exit code.
    """
    restarts = Restarts(config)
    while True:
        restarts.begin()
        again = restarts.after(start(restarts.words), is_asked=bool(requests.asked))
        if again is None:
            return restarts.code
        requests.wait(again.seconds)


def further_settings(*, resumes: bool) -> tuple[str, ...]:
    """Return the settings that a later start of a job adds: these alone, whatever another node
    sends.
    """
    return (_RESUME,) if resumes else ()


def is_state(state: Mapping[str, Any]) -> bool:
    """Check whether this is what `Restarts.state` returns, or the empty one of a job without
    restarts.
    """
    if not state:
        return True
    if state.keys() != _STATE.keys() or any(
        type(state[name]) is not kind for name, kind in _STATE.items()
    ):
        return False
    is_counted = all(0 <= state[name] <= _MOST_COUNTED for name in ("number", "idle"))
    return is_counted and len(state["last"]) <= _LONGEST_LAST


def is_final(code: int) -> bool:
    """Check whether no other start follows this exit code, whatever is allowed."""
    return code in _FINAL


def in_place(given: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line with further settings, in the place of what it says of the same
    keys.
    """
    keys = {word.partition("=")[0] for word in words}
    return (*(one for one in given if one.partition("=")[0] not in keys), *words)


def _given_up(*, is_again: bool, idle: int, left: int, most: int) -> str:
    if is_again:
        return "the same error at the same step again"
    if idle >= _MOST_IDLE:
        return f"{idle} starts in a row without a new checkpoint"
    if left:
        return ""
    return f"{counted(most, 'restart')} used up (supervision.max_restarts)"


class _Folder:
    """Run folder, as the supervisor sees it: what was saved since it began to look."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        """Look at the folder; `goes_on`: the job continues with a checkpoint that is there
        already.
        """
        self._path = path
        self._before = self._saved() or {}
        if goes_on:
            self._seen = max(self._before, default=-1)
        else:
            self._seen = -1
        self._is_lost = False
        self._looks = threading.Event()
        self._events_before = (0, 0)  # number and size of the file
        with suppress(OSError):
            found = (path / "events.jsonl").stat()
            self._events_before = (found.st_ino, found.st_size)

    def newest_step(self) -> int:
        """The step of the newest checkpoint that was not there before; -1 where there is none."""
        saved = self._saved() or {}
        new = [step for step, when in saved.items() if self._before.get(step) != when]
        newest = max(new, default=-1)
        self._seen = max(self._seen, newest)
        return newest

    def look(self) -> None:
        """Look every few seconds from now on: a folder that is moved away takes with it that
        something was saved.
        """
        self._looks.set()
        self._looks = threading.Event()
        threading.Thread(target=self._keep_looking, args=(self._looks,), daemon=True).start()

    def look_no_more(self) -> None:
        """End what `look` began."""
        self._looks.set()

    def _keep_looking(self, is_over: threading.Event) -> None:
        while not is_over.wait(_LOOK_SECONDS):
            self.newest_step()

    def note_lost(self) -> None:
        """Note that the run has lost its folder."""
        self._is_lost = True

    @property
    def gone(self) -> str:
        """Describe that what was saved is no longer there; empty where it is, or where nothing was
        saved.
        """
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
        """Check whether the events of this job tell of a checkpoint."""
        with suppress(OSError), open_own(self._path / "events.jsonl", "rb") as file:
            number, size = self._events_before
            if os.fstat(file.fileno()).st_ino == number:
                file.seek(size)
            return any(b'"kind": "save"' in line for line in file)
        return False

    def note(self, number: int, end: JobEnd, *, begun: float) -> None:
        """Write the restart among the events of the run, which nobody else writes now."""
        event: dict[str, Any] = {
            "time_seconds": round(time.time(), 3),
            "step": max(self.newest_step(), 0),
            "kind": "restart",
        }
        event |= {
            "number": number,
            "code": end.code,
            "cause": end.line,
            "seconds": round(time.time() - begun, 3),
        }
        with suppress(OSError), (self._path / "events.jsonl").open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            broken = file.read(1) not in (b"\n", b"")
            file.write(b"\n" * broken + json.dumps(event).encode() + b"\n")

    def _saved(self) -> dict[int, int] | None:
        """Step -> when its manifest was written, in nanoseconds; None where storage does not
        answer.
        """
        found = {}
        try:
            for step, path in named_folders(self._path / CHECKPOINTS):
                with suppress(FileNotFoundError):
                    found[step] = (path / MANIFEST).stat().st_mtime_ns
        except OSError:
            return None
        return found
