"""``events.jsonl``: one line for each thing that happened to a run, over all of its starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from framework.system.file_writer import hand_over, settle
from framework.system.files import open_own
from framework.system.log import listen_to_warnings
from framework.train.monitors.base import Point

_STARTS: Final = ("start", "resume")


class Events:
    """Appends events to the file of a run; and, as a monitor, notes the steps and what was skipped.

    A line is ``{"time_seconds": Unix time, "step": n, "kind": ..., "seconds": duration where it has one, ...}``. Kinds:
    ``start`` and ``resume``, ``evaluate``, ``save``, ``skip``, ``bad_step``,
    ``roll_back``, ``warning``, ``stop``, ``end``.

    Attributes:
        restarts: how often the run was started before.
    """

    name = "events.jsonl"

    def __init__(self, path: Path, *, from_step: int, clock: Callable[[], float] = time.time) -> None:
        """Open the file and note the start. A line that was not written to its end stays alone.

        Raises:
            OSError: it cannot be opened.
        """
        self._clock, self._step, self._skipped = clock, from_step, None if from_step else 0.0
        lines = []
        if os.path.lexists(path):
            with open_own(path, "r") as stream:
                lines = stream.read().split("\n")
        kinds = [_kind(line) for line in lines]
        self.restarts = sum(kind in _STARTS for kind in kinds) - kinds.count("roll_back")
        self._file = open_own(path, "a")
        if lines and lines[-1]:
            self._file.write("\n")
        listen_to_warnings(self._warn)
        self("resume" if from_step else "start", from_step)

    def __call__(self, kind: str, step: int, *, seconds: float | None = None, **details: Any) -> None:
        """Note an event after so many steps; `seconds` is how long it took. Storage that fails loses it."""
        self._step = step
        event = {"time_seconds": round(self._clock(), 3), "step": step, "kind": kind}
        duration = {} if seconds is None else {"seconds": round(seconds, 6)}
        hand_over(partial(self._append, json.dumps(event | duration | details) + "\n"))

    @staticmethod
    def append(path: Path, kind: str, step: int, **details: Any) -> None:
        """Note an event in a file that nobody holds open, and flush it to disk.

        Raises:
            OSError: it cannot be written.
        """
        settle()
        event = {"time_seconds": round(time.time(), 3), "step": step, "kind": kind}
        with open_own(path, "a") as stream:
            stream.write(json.dumps(event | details) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def write(self, point: Point) -> None:
        """Take a logged point."""
        self._step = point.step
        skipped = point.metrics.get("train/skipped_steps")
        if skipped is None:
            return
        if self._skipped is not None and skipped > self._skipped:
            self("skip", point.step, count=int(skipped - self._skipped))
        self._skipped = skipped

    def close(self) -> None:
        """Close the file, after what was handed over."""
        listen_to_warnings(None)
        hand_over(self._close)

    def _warn(self, text: str) -> None:
        self("warning", self._step, text=text)

    def _append(self, line: str) -> None:
        with suppress(OSError):
            self._file.write(line)
            self._file.flush()

    def _close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _kind(line: str) -> Any:
    try:
        return json.loads(line)["kind"]
    except (ValueError, TypeError, KeyError):
        return None
