"""`Monitor`: somewhere metrics go. Only rank 0 has any, but for what becomes part of the saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from framework.system.file_writer import hand_over, settle
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
    """Told about every logged point, in order of steps. One that raises is closed and told nothing more; the run goes
    on, but for a StorageError, which says that there is no folder to go on in."""

    name: str
    """What a warning calls it."""

    def write(self, point: Point) -> None:
        """Take one point."""
        ...

    def close(self) -> None:
        """Flush and release; called once, also after a failure."""
        ...


# Check that the run folder is still there and still this run's, made whenever something is logged, and so before every
# save.


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
    """A monitor that the thread of writes tells, so that storage that stalls does not stall the training."""

    def __init__(self, monitor: Monitor, *, after: Behind | None = None) -> None:
        """Wrap it; it is told nothing more once it, or `after`, has failed."""
        self.name = monitor.name
        self._monitor, self._after = monitor, after
        self._error: Exception | None = None

    def write(self, point: Point) -> None:
        """Hand a point over; raises what the monitor raised at this point, or late at an earlier one."""
        hand_over(partial(self._do, partial(self._monitor.write, point)))
        self._raise_error()

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
