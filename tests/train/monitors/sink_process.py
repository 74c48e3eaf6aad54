"""A service that goes wrong where it is asked to, in a process that imports next to nothing."""

from __future__ import annotations

import os
import signal

from framework.system.json_lines import MessageSocket
from framework.train.monitors import services
from framework.train.monitors.base import Point
from framework.train.monitors.services import Described


class Sink:
    """A service that writes down what it is told, and goes wrong where it is asked to."""

    name = "sink"

    def __init__(self, run: Described, *, fails: str) -> None:
        self._fails, self._path = fails, run.folder / "told"
        self._number = run.number_of(fails, lambda: str(os.getpid()))
        if fails == "make":
            raise ConnectionError("no such host")
        if fails == "exit":
            raise SystemExit(3)

    def write(self, point: Point) -> None:
        if self._fails == "write" and point.step == 2:
            raise ConnectionError("refused")
        if self._fails == "dies" and point.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(f"{point.step} {point.metrics['train/loss']}\n")

    def close(self) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write("closed\n")


def serve(channel: MessageSocket) -> None:
    """Have `Sink` stand for W&B, in the child; at the usual priority, or other tests would keep it
    from starting.
    """
    services._NICENESS = 0  # type: ignore[misc]
    services.SERVICES = {"wandb": Sink}  # type: ignore[misc]
    services.serve(channel)
