"""A monitor in a thread of its own, for one that talks to a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Final

from framework.train.monitors.base import Monitor, Point

_LONGEST_QUEUE: Final = 1000  # points that a sink may be behind
HURRIED_SECONDS: Final = 3.0


class Aside:
    """A sink that is made and called in its own thread, because it talks to a server, which may not
    answer.

    No step and no file of metrics waits for it; the end of the run waits `wait_seconds` at most.
    """

    def __init__(self, name: str, make: Callable[[], Monitor], *, wait_seconds: float) -> None:
        """Make the sink in its thread, and close it there when all points are written.

        Args:
            name: its name in warnings.
            make: makes it; an error is raised at a later `write` or at `close`.
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
        """Hand a point over; raises the sink's error, or TimeoutError if it is far behind."""
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
        """Wait until all points are written; raises TimeoutError if that takes too long.

        After a failure it does not wait.
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
                for point in iter(self._points.get, None):
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
