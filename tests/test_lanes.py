"""Lanes of tests: what two of them read is made once, and one that dies is a failure."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import lanes


class Item:
    """Stand-in for a test of a lane, which asks for a folder that is made once."""

    nodeid = "tests/test_here.py::test_it"

    def __init__(self, made: list[Path]) -> None:
        self._made = made
        hook = SimpleNamespace(pytest_runtest_protocol=self._run)
        self.config = SimpleNamespace(_tmp_path_factory=SimpleNamespace(), hook=hook)

    def _run(self, **_: Any) -> None:
        factory = self.config._tmp_path_factory
        factory.getbasetemp = lambda: factory._basetemp
        lanes.made_once("runs", self._made.append, factory)


def test_what_two_lanes_read_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    for lane in range(2):
        monkeypatch.setattr(lanes, "_number", lane)
        files = iter(["tests/test_here.py", None])
        channel: Any = SimpleNamespace(send=lambda _: None, recv=files.__next__)
        folder = tmp_path / f"lane{lane}"
        folder.mkdir()
        items: Any = {"tests/test_here.py": [Item(made)]}
        lanes._run_files(items, channel, folder)
    assert made == [tmp_path / "runs"]


@pytest.fixture
def reports() -> list[pytest.TestReport]:
    return []


@pytest.fixture
def session(reports: list[pytest.TestReport]) -> Any:
    hook = SimpleNamespace(pytest_runtest_logreport=lambda report: reports.append(report))
    return SimpleNamespace(config=SimpleNamespace(hook=hook), shouldfail=False, shouldstop=False)


def start_lane(parent: lanes._Lanes, run: Callable[[Connection], object]) -> Connection:
    """Start a process in the place of a lane, and return the channel to it."""
    ours, theirs = Pipe()
    stacks = lanes.stacks_file()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            lanes.write_stacks_on_request(stacks)
            run(theirs)
        finally:
            os._exit(0)
    theirs.close()
    parent._lanes[ours] = lanes._Lane(2, pid, stacks)
    return ours


@pytest.mark.parametrize("files", [["tests/test_lanes.py"], []])
def test_a_lane_that_ends_with_a_file_to_run_is_a_failure(
    files: list[str], session: Any, reports: list[pytest.TestReport]
) -> None:
    """It ran no test at that moment; a lane to which no file is left may end."""
    parent = lanes._Lanes(with_ranks=False)
    parent._left = dict.fromkeys(files)
    channel = start_lane(parent, lambda theirs: theirs.send(("next", None)))
    parent._answer(channel, session)
    parent._answer(channel, session)
    assert [report.nodeid for report in reports] == files
    assert not session.shouldfail


def test_files_that_no_lane_is_left_for_fail_the_run(session: Any) -> None:
    parent = lanes._Lanes(with_ranks=False)
    parent._left = dict.fromkeys(["tests/test_lanes.py", "tests/test_house.py"])
    channel = start_lane(parent, lambda theirs: theirs.send(("next", None)))
    parent._answer(channel, session)
    parent._answer(channel, session)
    assert "lane 2 ended while it ran tests/test_lanes.py" in session.shouldfail


def sit_in_native_code(theirs: Connection) -> None:
    """Start a test that no exception reaches, with a process of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGINT])
    child = subprocess.Popen(["sleep", "1000"])
    theirs.send(("starts", f"tests/test_here.py::test_with_{child.pid}"))
    while True:
        ctypes.CDLL(None).pause()


def test_a_lane_that_hangs_is_killed_with_its_processes_and_says_where(
    session: Any, reports: list[pytest.TestReport]
) -> None:
    parent = lanes._Lanes(with_ranks=False)
    channel = start_lane(parent, sit_in_native_code)
    parent._answer(channel, session)
    child = int(str(parent._lanes[channel].test).rpartition("_")[2])
    parent._end_silent(session, seconds=60.0)
    assert not reports
    parent._end_silent(session, seconds=0.0)
    assert not parent._lanes
    (report,) = reports
    text = str(report.longrepr)
    assert "lane 2 was silent for 0 s" in text
    assert "sit_in_native_code" in text
    assert re.search(rf"^{child} \w+ in \w+: sleep 1000$", text, re.MULTILINE)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(timeout=60)


def take_interrupts_and_ask(theirs: Connection) -> None:
    """Take an interrupt as a test may that handles each exception, and ask for the next file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    theirs.send(("starts", "tests/test_here.py::test_it"))
    lanes._request_file(theirs)


def test_a_lane_in_which_a_test_takes_the_interrupt_ends(session: Any) -> None:
    parent = lanes._Lanes(with_ranks=False)
    channel = start_lane(parent, take_interrupts_and_ask)
    parent._answer(channel, session)
    (lane,) = parent._lanes.values()
    parent._end()
    assert not psutil.pid_exists(lane.pid)
