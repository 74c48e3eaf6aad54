"""`Monitor`: somewhere metrics go. Only rank 0 has any, but for what becomes part of the saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


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
