"""Lanes for the whole suite, on two processors: a third of its time is spent waiting, for hosts
that fall silent or launchers that grant a grace.

One lane trains: files whose tests keep both processors busy, one after the other. One takes the
fast files. One takes those that wait, and leaves the processors to the others. A lane that is
through with its own takes a file of what is left: of what trains the last, where the first lane is
not yet.

Only a run of everything is split, with or without a choice by marker; `pytest tests/plan` is one
process as ever, and so is all of it with ``-n 0``.
"""

from __future__ import annotations

import itertools
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
    """Lanes for this call of pytest, where it is one for everything and xdist is there; called
    before xdist looks.
    """
    options = config.option
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    has_its_own_way = (
        options.usepdb or options.collectonly or options.capture == "no" or options.keyword
    )
    if number() is not None or not is_whole or has_its_own_way:
        return
    if getattr(options, "numprocesses", 0) is None and options.dist == "no":
        options.numprocesses, options.dist, options.loadscopereorder = 3, _DISTRIBUTION, False


def number() -> int | None:
    """Which lane this process is, the one that trains 0; None for one that runs everything."""
    name = os.environ.get("PYTEST_XDIST_WORKER")
    return None if name is None else int(name.removeprefix("gw"))


def next_file(left: Collection[str], *, lane: int) -> str:
    """What a lane takes of the files that are left, those that train before others."""
    own = {0: _trains, 1: _is_fast}.get(lane, _waits)
    chosen = itertools.chain(
        filter(own, left), itertools.filterfalse(_trains, left), reversed([*left])
    )
    return next(chosen)


def sort(items: list[pytest.Item]) -> None:
    """Fast tests first; in lanes, which take whole files, those that train before others."""
    in_lanes = number() is not None
    items.sort(
        key=lambda item: (in_lanes and not _trains(item.nodeid.partition("::")[0]), _is_slow(item))
    )


def is_first() -> bool:
    """Whether what is to happen once, happens in this process."""
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
