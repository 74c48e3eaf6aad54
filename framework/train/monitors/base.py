"""`Monitor`: somewhere metrics go. Only rank 0 has any, but for what becomes part of the saved
state.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Full, Queue
from threading import Thread
from typing import Any, Final, Protocol

from framework.errors import FrameworkError, StorageError, in_one_line
from framework.system.file_writer import hand_over, settle
from framework.system.log import warn
from framework.train.run_folder import RunFolder

_LONGEST_QUEUE: Final = 1000  # points that a sink may be behind
HURRIED_SECONDS: Final = 3.0


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
    """Gets every logged point, in order of steps. One that raises is closed and gets nothing more;
    the run goes on, but for a StorageError: there is no folder to go on in. The files of a run do
    not raise where storage fails: they keep what they are to hold
    (`framework.system.kept_file`).
    """

    name: str
    """What a warning calls it."""

    def write(self, point: Point) -> None:
        """Take one point."""
        ...

    def close(self) -> None:
        """Flush and release; called once, also after a failure."""
        ...


class Sinks:
    """Monitors of a run. One that fails costs a warning and itself, a StorageError of the run
    folder the run.
    """

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)

    def write(self, point: Point) -> None:
        """Hand a point to all."""
        for monitor in tuple(self._monitors):
            try:
                monitor.write(point)
            except StorageError:  # not of a monitor: of the whole run folder
                raise
            except Exception as error:
                # Hours of training are worth more than a curve: a full disk or a closed terminal
                # costs only the monitor.
                self._monitors.remove(monitor)
                warn_failed(monitor.name, error)
                with suppress(Exception):
                    monitor.close()

    def close(self, *, hurries: bool) -> None:
        """Close all; `hurries`: the run has stopped or failed, and others wait for this rank."""
        for monitor in self._monitors if hurries else ():
            getattr(monitor, "hurry", lambda: None)()
        while self._monitors:
            monitor = self._monitors.pop(0)
            try:
                monitor.close()
            except Exception as error:
                warn_failed(monitor.name, error)


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in nested sections; lists, and sections without keys, as
    JSON text.
    """
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        plain = values is None or isinstance(values, str | bool | int | float)
        yield prefix, values if plain else json.dumps(values, default=str)


def warn_failed(name: str, error: Exception) -> None:
    """Warn that a monitor is given up, and why, in one line."""
    warn(f"{name}: {reason_of(error)}; training goes on without it [monitor-failed]")


def reason_of(error: BaseException) -> str:
    """Return why a monitor failed, in one line."""
    if isinstance(error, FrameworkError):
        return str(error)
    return getattr(error, "strerror", None) or in_one_line(error, longest=300)


def made(name: str, make: Callable[[], Monitor]) -> list[Monitor]:
    """The monitor, or none and a warning: one that cannot be made is no reason to end a run. A link
    where a file of the run belongs is: it leads out of the folder.
    """
    try:
        return [make()]
    except Exception as error:
        if isinstance(error, StorageError) or getattr(error, "errno", None) == errno.ELOOP:
            raise
        warn_failed(name, error)
        return []


# Check that the run folder is still there and still this run's, made whenever something is logged,
# and so before every save.


class HeldFolder:
    """No destination of metrics, but a look at where all of them go; what it finds ends the run."""

    name = "run folder"

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def write(self, point: Point) -> None:
        """Raises StorageError where the folder is lost."""
        self._folder.check_held()

    def close(self) -> None:
        """Nothing is held."""


class Behind:
    """A monitor that the thread of writes tells, so that storage that stalls does not stall the
    training.
    """

    def __init__(self, monitor: Monitor, *, after: Behind | None = None) -> None:
        """Wrap it; it is told nothing more once it, or `after`, has failed."""
        self.name = monitor.name
        self._monitor = monitor
        self._after = after
        self._error: Exception | None = None

    def write(self, point: Point) -> None:
        """Hand a point over; raises what the monitor raised at this point, or late at an earlier
        one.
        """
        hand_over(partial(self._do, partial(self._monitor.write, point)))
        self._raise_error()

    def show(self, *shown: Any) -> None:
        """Hand over what is no number; what it raises is raised at a later point."""
        hand_over(partial(self._do, partial(getattr(self._monitor, "show"), *shown)))  # noqa: B009

    def settle(self) -> None:
        """Wait until everything is written; raises what the monitor raised."""
        settle()
        self._raise_error()

    def close(self) -> None:
        """Wait, and close the monitor."""
        failed = self._error is not None
        settle()
        self._monitor.close()
        if not failed:  # else it has been raised
            self._raise_error()

    def _do(self, write: Callable[[], None]) -> None:
        if self._error is None and (self._after is None or self._after._error is None):
            try:
                write()
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Aside:
    """A sink in a thread of its own, from its making on: one that talks to a server, which may not
    answer. No step waits for it, nor does any file of metrics, and the end of the run no longer
    than was agreed.
    """

    def __init__(self, name: str, make: Callable[[], Monitor], *, wait_seconds: float) -> None:
        """Make the sink in its thread, and close it there when all points are written.

        Args:
            name: what a warning calls it.
            make: makes it; what it raises is raised at a later `write` or at `close`.
            wait_seconds: longest wait of `close`.
        """
        self.name = name
        self._make = make
        self._wait_seconds = wait_seconds
        self._points: Queue[Point | None] = Queue(_LONGEST_QUEUE)
        self._error: Exception | None = None
        self._is_over = False
        self._thread = Thread(target=self._work, name=f"monitor-{name}", daemon=True)
        self._thread.start()

    def write(self, point: Point) -> None:
        """Hand a point over; raises what the sink has raised, and TimeoutError where it is far
        behind.
        """
        try:
            self._raise_error()
            self._points.put_nowait(point)
        except Full:
            self._is_over = True
            raise TimeoutError(
                f"it does not answer, and {_LONGEST_QUEUE} points wait for it"
            ) from None

    def hurry(self) -> None:
        """Wait less in `close`: a run that was asked to stop, or has failed, may have no more
        time.
        """
        self._wait_seconds = min(self._wait_seconds, HURRIED_SECONDS)

    def close(self) -> None:
        """Wait until all points are written; raises TimeoutError where that takes too long. After a
        failure it does not wait.
        """
        if self._is_over:
            return
        with suppress(Full):
            self._points.put_nowait(None)
        self._thread.join(self._wait_seconds)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(
                f"it was not done {self._wait_seconds:g} s after the last step, and its last "
                "points may be lost"
            )

    def _work(self) -> None:
        try:
            monitor = self._make()
            try:
                while (point := self._points.get()) is not None:
                    monitor.write(point)
            finally:
                monitor.close()
        except Exception as error:
            self._error = error
        except SystemExit as error:  # some packages exit where they mean to raise
            self._error = RuntimeError(f"it ended its thread ({error})")

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_over = True
            raise self._error
