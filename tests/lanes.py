"""Two lanes for the whole suite: half of its time is spent waiting, for hosts that fall silent or launchers that grant a grace.

One lane trains: tests that keep both processors busy, one after the other. The other takes the fast tests and then those that
wait. Whoever is through first takes a file of what is left.

Only a run of everything is split, with or without a choice by marker; `pytest tests/plan` is one process as ever, and so is all
of it with ``-n 0``.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

NUM_LANES: Final = 2
# Slow files that wait more than they work.
WAITING: Final = (
    "tests/launch/", "tests/hosts/", "tests/kubelet/", "tests/campaign/test_launch_faults.py",
    "tests/campaign/test_torchrun_kills.py", "tests/test_public_names.py", "tests/test_quickstart.py", "tests/test_stopping.py",
    "tests/test_train_script.py", "tests/test_uncaught.py",
)  # fmt: skip
_TRAINING: Final = "training"


def choose(config: pytest.Config) -> None:
    """Two lanes for this call of pytest, where it is one for everything and xdist is there; called before xdist looks."""
    if _is_a_lane():  # which pytest calls as well, and which would open lanes of its own
        return
    options = config.option
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    has_its_own_way = options.usepdb or options.collectonly or options.capture == "no" or options.keyword
    if not is_whole or has_its_own_way or getattr(options, "numprocesses", 0) is not None or options.dist != "no":
        return
    options.numprocesses, options.dist, options.loadscopereorder = NUM_LANES, "loadgroup", False


def sort(items: list[pytest.Item]) -> None:
    """In one process: fast tests first. In lanes: a group for all that trains, and one for each other file."""
    if not _is_a_lane():
        items.sort(key=_is_slow)
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_TRAINING if _trains(item) else _file(item)))
    items.sort(key=lambda item: (not _trains(item), _is_slow(item)))


def is_first() -> bool:
    """Whether what is to happen once, happens in this process."""
    return os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"


def _is_a_lane() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _trains(item: pytest.Item) -> bool:
    return _is_slow(item) and not _file(item).startswith(WAITING)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
