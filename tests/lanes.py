"""Two lanes for the whole suite: half of its time is spent waiting, for hosts that fall silent or launchers that grant
a grace.

One lane trains: files whose tests keep both processors busy, one after the other. The other takes the fast files and
then those that wait. Whoever is through first takes a file of what is left: of what trains the last, where the other
lane is not yet.

Only a run of everything is split, with or without a choice by marker; `pytest tests/plan` is one process as ever, and
so is all of it with ``-n 0``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from functools import cache
from typing import Final

import pytest

from tests.places import ROOT

NUM_LANES: Final = 2
# Slow files that wait more than they work, or work on one processor.
WAITING: Final = (
    "tests/launch/",
    "tests/doctor/",
    "tests/deploy/",
    "tests/system/test_parent_watch.py",
    "tests/commands/test_stage_balance.py",
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
    """Two lanes for this call of pytest, where it is one for everything and xdist is there; called before xdist
    looks.
    """
    options = config.option
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    has_its_own_way = options.usepdb or options.collectonly or options.capture == "no" or options.keyword
    if _is_a_lane() or not is_whole or has_its_own_way:
        return
    if getattr(options, "numprocesses", 0) is None and options.dist == "no":
        options.numprocesses, options.dist, options.loadscopereorder = NUM_LANES, _DISTRIBUTION, False


def next_file(left: Collection[str], *, first_lane: bool) -> str:
    """What a lane takes of the files that are left, those that train before others."""
    if first_lane:
        return next(iter(left))
    return next(itertools.filterfalse(_trains, left), [*left][-1])


def sort(items: list[pytest.Item]) -> None:
    """Fast tests first; in lanes, which take whole files, those that train before others."""
    in_lanes = _is_a_lane()
    items.sort(key=lambda item: (in_lanes and not _trains(item.nodeid.partition("::")[0]), _is_slow(item)))


def is_first() -> bool:
    """Whether what is to happen once, happens in this process."""
    return os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"


def _is_a_lane() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


@cache
def _trains(file: str) -> bool:
    return not file.startswith(WAITING) and "mark.slow" in (ROOT / file).read_text(encoding="utf-8")


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
