"""Files of metrics on storage that stalls: points wait for it, the run does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from framework.errors import StorageError
from framework.system import file_writer
from framework.train.monitors.base import Behind, Point
from tests.train.monitors.points import point


class Stalled:
    """A monitor whose writes wait for `storage`; from `fails_at` on it raises."""

    name = "stalled"

    def __init__(self, error: Exception | None = None, *, fails_at: int = 0) -> None:
        self.storage, self.steps = threading.Event(), list[int]()
        self._error, self._fails_at = error, fails_at

    def write(self, point: Point) -> None:
        assert self.storage.wait(30)
        if self._error is not None and point.step >= self._fails_at:
            raise self._error
        self.steps.append(point.step)

    def close(self) -> None:
        self.steps.append(-1)


@pytest.fixture(autouse=True)
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a writer of this test: of others, files are complete as soon as they are written."""
    monkeypatch.setattr(file_writer, "_WRITER", file_writer._Writer())
    file_writer.start()
    yield
    file_writer.settle()


def test_points_wait_for_the_storage_and_the_run_does_not() -> None:
    slow, other = Stalled(), Stalled()
    other.storage.set()
    monitors, started = [Behind(slow), Behind(other)], time.monotonic()
    try:
        for step in range(100):
            for monitor in monitors:
                monitor.write(point(step))
        assert time.monotonic() - started < 5.0  # 10 s, did each wait its moment
        assert slow.steps == other.steps == []
    finally:  # else the writer waits for it, and what comes next for the writer
        threading.Timer(0.1, slow.storage.set).start()
    for monitor in monitors:
        monitor.close()
    assert slow.steps == other.steps == [*range(100), -1]


def test_without_a_stall_a_failure_is_met_at_its_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "_MOMENT_SECONDS", 30.0)  # a busy machine is no stall
    monitor = Stalled(OSError("full"), fails_at=2)
    monitor.storage.set()
    behind = Behind(monitor)
    behind.write(point(1))
    with pytest.raises(OSError, match="full"):
        behind.write(point(2))
    behind.close()
    assert monitor.steps == [1, -1]


@pytest.mark.parametrize("meets", ["write", "settle", "close"])
def test_a_late_failure_is_met_afterwards_and_nothing_is_written_after_it(meets: str) -> None:
    """Least of all into a folder that is no longer this run's."""
    held, file = Stalled(StorageError("lost"), fails_at=2), Stalled()
    file.storage.set()
    behind = Behind(held)
    after = Behind(file, after=behind)
    for step in (1, 2, 3):
        behind.write(point(step))
        after.write(point(step))
    held.storage.set()
    if meets == "write":
        file_writer.settle()
    with pytest.raises(StorageError, match="lost"):
        behind.write(point(4)) if meets == "write" else getattr(behind, meets)()
    assert file.steps == [1]
