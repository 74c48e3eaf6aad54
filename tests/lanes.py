"""Lanes for the whole suite, on two processors: a third of its time is spent waiting, for hosts
that fall silent or launchers that grant a grace period.

One lane takes the files of tests that train and keep both processors busy, one file after the
other. One lane takes the fast files. One lane takes the files that wait, and leaves the processors
to the others. A lane that has finished its own files takes one of another lane: of the files that
train the last one, since the first lane begins with the first.

Only a run of the whole suite is split, with or without a choice by marker; `pytest tests/plan`, and
the whole suite with ``-n 0``, run in one process.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache
from typing import Final

import pytest

from tests.places import ROOT

# Files of slow tests that wait more than they work, or work on one processor.
WAITING: Final = (
    "tests/launch/",
    "tests/doctor/",
    "tests/deploy/",
    "tests/system/test_parent_watch.py",
    "tests/commands/test_stage_balance.py",
    "tests/engine/test_collective_timeout.py",
    "tests/engine/test_hang_watch.py",
    "tests/engine/test_pipeline_failures.py",
    "tests/engine/test_process_group_errors.py",
    "tests/engine/test_stragglers.py",
    "tests/hosts/",
    "tests/kubelet/",
    "tests/campaign/test_launch_faults.py",
    "tests/campaign/test_torchrun_kills.py",
    "tests/test_public_names.py",
    "tests/test_quickstart.py",
    "tests/test_stopping.py",
    "tests/test_train_script.py",
    "tests/system/test_uncaught.py",
    "tests/config/",
    "tests/text/",
    "tests/dslint/test_fixes.py",
    "tests/dslint/rules/test_any_value.py",
)
_DISTRIBUTION: Final = "loadscope"  # a file goes to one lane as a whole


def choose(config: pytest.Config) -> None:
    """Set xdist's options for lanes, if this call of pytest is for the whole suite and xdist is
    installed. To be called before xdist reads them.
    """
    options = config.option
    is_whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    needs_one_process = (
        options.usepdb or options.collectonly or options.capture == "no" or options.keyword
    )
    if number() is not None or not is_whole_suite or needs_one_process:
        return
    if getattr(options, "numprocesses", 0) is None and options.dist == "no":
        options.numprocesses = 3
        options.dist = _DISTRIBUTION
        options.loadscopereorder = False


def number() -> int | None:
    """Return the number of this process's lane, 0 for the one that trains; None without lanes."""
    name = os.environ.get("PYTEST_XDIST_WORKER")
    if name is None:
        return None
    return int(name.removeprefix("gw"))


def next_file(left: Collection[str], *, lane: int) -> str:
    """Return the file that a lane takes next: its own first, then one that does not train, then the
    last one.
    """
    if lane == 0:
        is_own = _trains
    elif lane == 1:
        is_own = _is_fast
    else:
        is_own = _waits
    for file in left:
        if is_own(file):
            return file
    for file in left:
        if not _trains(file):
            return file
    return list(left)[-1]


def sort(items: list[pytest.Item]) -> None:
    """Sort fast tests first. In lanes, which take whole files, files that train come before others."""
    in_lanes = number() is not None

    def order(item: pytest.Item) -> tuple[bool, bool]:
        file = item.nodeid.partition("::")[0]
        return in_lanes and not _trains(file), _is_slow(item)

    items.sort(key=order)


def is_first() -> bool:
    """Return whether this process does the work that is done once for all lanes."""
    return not number()


@cache
def _trains(file: str) -> bool:
    return not _waits(file) and "mark.slow" in (ROOT / file).read_text(encoding="utf-8")


def _waits(file: str) -> bool:
    return file.startswith(WAITING)


def _is_fast(file: str) -> bool:
    return not _waits(file) and not _trains(file)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
