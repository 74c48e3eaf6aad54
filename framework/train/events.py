"""``events.jsonl``: one line for each event of a run, over all of its starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from framework.system.clock import boot, now, seconds_since_boot
from framework.system.file_writer import hand_over, settle
from framework.system.files import open_own
from framework.system.kept_file import KeptFile
from framework.system.log import listen_to_events
from framework.train.monitors.base import Point

_STARTS: Final = ("start", "resume")
_LONGEST_LINE: Final = 1 << 18


class Events:
    """Appends events to the file of a run; as a monitor, it also records skipped steps.

    A line is ``{"time_seconds": Unix time, "step": n, "kind": ..., "seconds": duration of those
    that have one, ...}``. Kinds: ``start`` and ``resume``, ``changed``, ``measured``,
    ``first_step``, ``evaluate``, ``save``, ``callbacks``, ``skip``, ``bad_step``, ``roll_back``,
    ``warning``, ``straggler``, ``slow``, ``hang``, ``stop``, ``end``; ``reached`` is the last step
    of an earlier start, where this start takes steps again.

    Attributes:
        restarts: how often the run was started before.
    """

    name = "events.jsonl"

    def __init__(
        self,
        path: Path,
        *,
        from_step: int,
        seconds: float | None = None,
        clock: Callable[[], float] = now,
    ) -> None:
        """Open the file and record the start, with the `seconds` since this process began; from
        here on, events of the whole process (`listen_to_events`) are recorded as well.

        After a last line that is incomplete, the events begin on a new line. A resume from a step
        before the last logged one is preceded by ``reached``.

        Raises:
            OSError: the file cannot be opened.
        """
        self._clock = clock
        self._step = from_step
        self._skipped: float | None = None
        if from_step == 0:
            self._skipped = 0.0
        lines: list[str] = []
        if os.path.lexists(path):
            with open_own(path, "r") as stream:
                lines = stream.read().split("\n")
        kinds = [_kind(line) for line in lines]
        # A roll back is no start of the run, but the loop that follows it is recorded as one.
        self.restarts = sum(kind in _STARTS for kind in kinds) - kinds.count("roll_back")
        self._file = KeptFile(path, name=self.name)
        if lines and lines[-1]:
            self._file.append(b"\n")
        listen_to_events(self._hear)
        if from_step:
            reached = _last_point(path.with_name("metrics.jsonl"))
            if reached and reached["step"] > from_step:
                self._append(from_step, json.dumps(reached | {"kind": "reached"}))
        kind = "resume" if from_step else "start"
        boot_details: dict[str, Any] = {}
        if clock is now:
            boot_details = {"boot": boot(), "boot_seconds": round(seconds_since_boot(), 3)}
        self(kind, from_step, seconds=seconds, **boot_details)

    def __call__(
        self, kind: str, step: int, *, seconds: float | None = None, **details: Any
    ) -> None:
        """Record an event after `step` steps; `seconds` is how long it took.

        While storage refuses it, the event is kept in memory.
        """
        self._step = step
        event = {"time_seconds": round(self._clock(), 3), "step": step, "kind": kind}
        if seconds is not None:
            event["seconds"] = round(seconds, 6)
        hand_over(partial(self._append, step, json.dumps(event | details)))

    @staticmethod
    def append(path: Path, kind: str, step: int, **details: Any) -> None:
        """Record an event in a file that no process holds open, and flush it to disk, after all
        writes that this process has handed over: it waits for them.

        Raises:
            OSError: the event cannot be written.
        """
        settle()
        event = {"time_seconds": round(now(), 3), "step": step, "kind": kind}
        with open_own(path, "a") as stream:
            stream.write(json.dumps(event | details) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def write(self, point: Point) -> None:
        """Take a logged point, and record the steps that were skipped since the last one."""
        self._step = point.step
        skipped = point.metrics.get("train/skipped_steps")
        if skipped is None:
            return
        if self._skipped is not None and skipped > self._skipped:
            self("skip", point.step, count=int(skipped - self._skipped))
        self._skipped = skipped

    def close(self) -> None:
        """Close the file, in the thread of writes, after the events that were handed over."""
        listen_to_events(None)
        hand_over(self._close)

    def _hear(self, kind: str, step: int | None = None, **details: Any) -> None:
        if step is None:
            step = self._step
        self(kind, step, **details)

    def _append(self, step: int, line: str) -> None:
        self._file.append(f"{line}\n".encode(), step=step)

    def _close(self) -> None:
        with suppress(OSError):
            self._file.close()


def note_closed(path: Path, *, step: int) -> None:
    """Record that a run which has ended has nothing left to write, in the file that no process has
    open any more.
    """
    event = {"time_seconds": round(now(), 3), "step": step, "kind": "closed"}
    with suppress(OSError), open_own(path, "a") as file:
        file.write(json.dumps(event) + "\n")


def failure_in(path: Path) -> str:
    """Return the error that ended the last start of a run, with its step; empty if none did, or if
    the file cannot be read.
    """
    failure = ""
    with suppress(OSError), open_own(path, "r") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                if event["kind"] in (*_STARTS, "end"):
                    failure = ""
                if event["kind"] == "end" and event.get("error"):
                    failure = f"failed after step {event['step']}: {event['error']}"
    return failure


def carry_over(before: Path, after: Path) -> None:
    """Copy the events of a start that has saved nothing to the folder of the job's next start.

    Args:
        before: folder of the earlier start, which was moved aside.
        after: folder of the next start.
    """
    with suppress(OSError, ValueError), open_own(before / "events.jsonl", "r") as file:
        text = file.read()
        last_line = text.rstrip("\n").rpartition("\n")[2]
        if _kind(last_line) != "restart":  # the folder is another job's
            return
        reached = _last_point(before / "metrics.jsonl")
        if reached:
            text += json.dumps(reached | {"kind": "reached"}) + "\n"
        with open_own(after / "events.jsonl", "a") as out:
            out.write(text)


def _last_point(path: Path) -> dict[str, Any]:
    """Return step and time of the last point in a file of metrics; empty if it has none."""
    with suppress(OSError, ValueError, TypeError, KeyError), open_own(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST_LINE))
        complete_lines = file.read().rpartition(b"\n")[0]
        point = json.loads(complete_lines.rpartition(b"\n")[2])
        return {"time_seconds": round(float(point["time"]), 3), "step": int(point["step"])}
    return {}


def _kind(line: str) -> Any:
    try:
        return json.loads(line)["kind"]
    except (ValueError, TypeError, KeyError):
        return None
