"""`Monitor`: a destination of metrics. Rank 0 alone has monitors, but for those with a state that
is saved.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from framework.errors import FrameworkError, StorageError, in_one_line
from framework.system.file_writer import hand_over, settle
from framework.system.log import warn
from framework.train.run_folder import RunFolder


@dataclass(frozen=True)
class Point:
    """Metrics at one step.

    Attributes:
        step: optimizer steps taken.
        epoch: passes over the data, as a fraction.
        time_seconds: Unix time.
        metrics: ``area/name`` -> value.
    """

    step: int
    epoch: float
    time_seconds: float
    metrics: Mapping[str, float]


class Monitor(Protocol):
    """Gets every logged point, in order of steps.

    A monitor that raises is closed and gets no further point, and the run goes on. A StorageError
    ends the run: its folder is gone. The files of a run do not raise where storage fails: they keep
    their content in memory (`framework.system.kept_file`).
    """

    name: str
    """Its name in warnings."""

    def write(self, point: Point) -> None:
        """Take one point."""
        ...

    def close(self) -> None:
        """Flush and release; called once, also after a failure."""
        ...


class Sinks:
    """Monitors of a run. A monitor that fails is removed with a warning; a StorageError ends the
    run.
    """

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)

    def write(self, point: Point) -> None:
        """Hand a point to all."""
        for monitor in tuple(self._monitors):
            try:
                monitor.write(point)
            except StorageError:  # the whole run folder is lost, not one monitor
                raise
            except Exception as error:
                # Hours of training are worth more than a curve: a full disk or a closed terminal
                # costs only the monitor.
                self._monitors.remove(monitor)
                warn_failed(monitor.name, error)
                with suppress(Exception):
                    monitor.close()

    def close(self, *, hurries: bool) -> None:
        """Close all monitors; those that fail are only warned of.

        Args:
            hurries: the run has stopped or failed, and other ranks wait for this one: monitors
                that have a `hurry` method are asked not to send what is left.
        """
        if hurries:
            for monitor in self._monitors:
                hurry = getattr(monitor, "hurry", None)
                if hurry is not None:
                    hurry()
        while self._monitors:
            monitor = self._monitors.pop(0)
            try:
                monitor.close()
            except Exception as error:
                warn_failed(monitor.name, error)


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every entry of nested sections.

    Lists, and sections without keys, are JSON text.
    """
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            yield from flat(value, key)
    elif prefix:
        if values is None or isinstance(values, str | bool | int | float):
            yield prefix, values
        else:
            yield prefix, json.dumps(values, default=str)


def warn_failed(name: str, error: Exception) -> None:
    """Warn, in one line, that a monitor is given up, and why."""
    warn(f"{name}: {reason_of(error)}; training goes on without it [monitor-failed]")


def reason_of(error: BaseException) -> str:
    """Return why a monitor failed, in one line."""
    if isinstance(error, FrameworkError):
        return str(error)
    return getattr(error, "strerror", None) or in_one_line(error, longest=300)


def make_or_warn(name: str, make: Callable[[], Monitor]) -> list[Monitor]:
    """Return the monitor in a list, or warn and return an empty list if it cannot be made.

    Raises:
        StorageError: `make` raised it: the run has to end.
        OSError: ELOOP alone: a link in place of a file of the run leads out of its folder.
    """
    try:
        return [make()]
    except Exception as error:
        if isinstance(error, StorageError) or getattr(error, "errno", None) == errno.ELOOP:
            raise
        warn_failed(name, error)
        return []


# The check that the run folder is still there and still this run's. It runs at every logged point,
# and so before every save.


class HeldFolder:
    """No destination of metrics, but a check of the folder that holds them; a lost folder ends the
    run.
    """

    name = "run folder"

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def write(self, point: Point) -> None:
        """Check the folder; raises StorageError if it is lost."""
        self._folder.check_held()

    def close(self) -> None:
        """Do nothing: it holds nothing open."""


class Behind:
    """A monitor that is called in the thread of writes, so that slow storage does not stall the
    training.
    """

    def __init__(self, monitor: Monitor, *, after: Behind | None = None) -> None:
        """Wrap a monitor; it is not called again once it, or `after`, has failed."""
        self.name = monitor.name
        self._monitor = monitor
        self._after = after
        self._error: Exception | None = None

    def write(self, point: Point) -> None:
        """Hand a point over; raises the monitor's error at this point or at an earlier one."""
        hand_over(partial(self._call_unless_failed, partial(self._monitor.write, point)))
        self._raise_error()

    def show(self, *shown: Any) -> None:
        """Hand over images, text or histograms; the monitor's error is raised at a later point."""
        monitor: Any = self._monitor
        hand_over(partial(self._call_unless_failed, partial(monitor.show, *shown)))

    def settle(self) -> None:
        """Wait until everything is written; raises the monitor's error."""
        settle()
        self._raise_error()

    def close(self) -> None:
        """Wait until everything is written, and close the monitor; raises an error of the monitor
        that was not raised before.
        """
        failed = self._error is not None
        settle()
        self._monitor.close()
        if not failed:  # else it has been raised
            self._raise_error()

    def _call_unless_failed(self, write: Callable[[], None]) -> None:
        if self._error is None and (self._after is None or self._after._error is None):
            try:
                write()
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
