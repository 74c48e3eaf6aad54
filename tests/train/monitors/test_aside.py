"""Sinks that talk to servers: a server that does not answer costs its points, and neither a step
nor the run.
"""

from __future__ import annotations

import threading
import time

import pytest

from framework.train.monitors.aside import Aside
from framework.train.monitors.base import Point
from tests.train.monitors.points import point


class Server:
    """A sink whose `write` waits for `answers`."""

    name = "server"

    def __init__(self, *, fails_at: int = -1) -> None:
        self.answers, self.steps = threading.Event(), list[int]()
        self.closed_in = ""
        self._fails_at = fails_at

    def write(self, point: Point) -> None:
        assert self.answers.wait(30)
        if point.step == self._fails_at:
            raise ConnectionError("refused")
        self.steps.append(point.step)

    def close(self) -> None:
        self.closed_in = threading.current_thread().name


def test_points_arrive_in_order_and_it_is_closed_in_its_own_thread() -> None:
    server = Server()
    server.answers.set()
    aside = Aside("server", lambda: server, wait_seconds=30)
    for step in range(50):
        aside.write(point(step))
    aside.close()
    assert server.steps == [*range(50)]
    assert server.closed_in == "monitor-server"


def test_a_server_that_does_not_answer_stalls_neither_steps_nor_the_end() -> None:
    server = Server()
    aside, started = Aside("server", lambda: server, wait_seconds=0.2), time.monotonic()
    for step in range(500):
        aside.write(point(step))
    with pytest.raises(
        TimeoutError,
        match=r"it was not done 0\.2 s after the last step, and its last points may be lo",
    ):
        aside.close()
    assert 0.2 <= time.monotonic() - started < 20
    server.answers.set()


def test_a_run_that_stops_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.train.monitors.aside.HURRIED_SECONDS", 0.1)
    server = Server()
    aside, started = Aside("server", lambda: server, wait_seconds=30), time.monotonic()
    aside.write(point(1))
    aside.hurry()
    with pytest.raises(TimeoutError, match=r"not done 0\.1 s after"):
        aside.close()
    assert time.monotonic() - started < 20
    server.answers.set()


def test_one_that_falls_far_behind_is_given_up_and_not_waited_for() -> None:
    server = Server()
    aside = Aside("server", lambda: server, wait_seconds=30)

    def write_many() -> None:
        for step in range(1002):  # one is being written
            aside.write(point(step))

    with pytest.raises(TimeoutError, match="it does not answer, and 1000 points wait for it"):
        write_many()
    started = time.monotonic()
    aside.close()
    assert time.monotonic() - started < 20
    server.answers.set()


@pytest.mark.parametrize("meets", ["write", "close"])
def test_what_the_making_raises_is_raised_where_the_run_can_warn(meets: str) -> None:
    def make() -> Server:
        raise ConnectionError("no such host")

    aside = Aside("server", make, wait_seconds=30)
    aside._thread.join(30)
    with pytest.raises(ConnectionError, match="no such host"):
        aside.write(point(1)) if meets == "write" else aside.close()
    aside.close()  # once is enough


def test_an_exit_in_its_thread_is_an_error() -> None:
    """Some packages exit where they mean to raise."""

    def make() -> Server:
        raise SystemExit(3)

    aside = Aside("server", make, wait_seconds=30)
    with pytest.raises(RuntimeError, match=r"it ended its thread \(3\)"):
        aside.close()


def test_after_a_failure_nothing_is_written_and_it_is_closed() -> None:
    server = Server(fails_at=2)
    server.answers.set()
    aside = Aside("server", lambda: server, wait_seconds=30)
    for step in (1, 2):
        aside.write(point(step))
    aside._thread.join(30)
    with pytest.raises(ConnectionError, match="refused"):
        aside.write(point(3))
    aside.close()
    assert server.steps == [1]
    assert server.closed_in == "monitor-server"
