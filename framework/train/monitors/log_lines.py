"""The rank's own log: a line per logged point, on every rank, so that the log of one that died says how far it came."""

from __future__ import annotations

from framework.system.log import note
from framework.train.monitors.base import Point
from framework.train.monitors.console import describe


class LogLines:
    """One line per logged point, also where the terminal shows a bar or nothing."""

    name = "log"

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def write(self, point: Point) -> None:
        note(f"step {point.step}/{self._total_steps}  epoch {point.epoch:.2f}  {describe(point)}")

    def close(self) -> None:
        """The log stays open: how the run ended follows."""
