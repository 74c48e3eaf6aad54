"""`Monitor`: somewhere metrics go. Only rank 0 has any, but for what becomes part of the saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

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
