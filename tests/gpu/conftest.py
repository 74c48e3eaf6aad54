"""Tests of a device that is lent for minutes: a second call goes on behind what has passed."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--passed",
        metavar="FILE",
        type=Path,
        help="leave out the tests that FILE lists, and add those that pass to it",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that have passed in an earlier call."""
    path: Path | None = config.getoption("--passed")
    if path is None or not path.exists():
        return
    passed = set(path.read_text(encoding="utf-8").splitlines())
    items[:] = [item for item in items if item.nodeid not in passed]


class _Passed:
    """Writes down which tests pass, one by one: the process may be killed at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name of a test that passed."""
        if report.when == "call" and report.passed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--passed")
    if path is not None:
        config.pluginmanager.register(_Passed(path))
