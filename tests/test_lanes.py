"""Lanes of tests: what two of them read is made once, and one that dies is a failure."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize("files", [["tests/test_lanes.py"], []])
def test_a_lane_that_ends_with_a_file_to_run_is_a_failure(files: list[str]) -> None:
    """It ran no test at that moment; a lane to which no file is left may end."""
    reports: list[pytest.TestReport] = []
    hook = SimpleNamespace(pytest_runtest_logreport=lambda report: reports.append(report))
    session: Any = SimpleNamespace(
        config=SimpleNamespace(hook=hook), shouldfail=False, shouldstop=False
    )
    parent = lanes._Lanes(with_ranks=False)
    parent._left = dict.fromkeys(files)
    ours, theirs = Pipe()
    parent._lanes[ours] = 2
    theirs.send(("next", None))
    parent._answer(ours, session)
    theirs.close()
    parent._answer(ours, session)
    assert [report.nodeid for report in reports] == files
    assert bool(session.shouldfail) == bool(files)
