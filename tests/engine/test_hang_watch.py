"""A run whose steps stop coming says within seconds which rank keeps the others waiting, and where it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from framework.engine.hang_watch import Gaps, HangWatch, Watched, place_of, sentence
from framework.engine.protocol import EVALUATING, SAVING, STEPS
from tests.launched import ROOT
from tests.warm_ranks import WarmRanks


def state(
    step: int, place: str, *, call: str = "", number: int = 0, waits: bool = True, phase: str = STEPS
) -> dict[str, Any]:
    calls = {"gloo 0": {"number": number, "name": call, "elements": 300, "waits": waits}} if call else {}
    return {"seconds": 12.0, "phase": phase, "step": step, "place": place, "calls": calls}


WAITS = state(40, "train.py:9 in step", call="all_reduce", number=412)


def test_a_rank_that_did_not_enter_what_the_others_wait_in() -> None:
    states = {0: WAITS, 1: WAITS, 2: state(40, "data.py:3 in read"), 3: WAITS}
    assert sentence(states, world_size=4) == (
        "no step for 12 s after step 40: rank 2 did not enter all_reduce #412 of 300 elements, and is at "
        "data.py:3 in read; 3 others wait in all_reduce #412 of 300 elements at train.py:9 in step"
    )


def test_a_rank_that_does_not_answer() -> None:
    assert "rank 1 does not answer (stopped, or Python's lock is held); 1 other waits" in sentence(
        {0: WAITS}, world_size=2
    )


def test_ranks_in_different_collectives() -> None:
    found = sentence({0: WAITS, 1: state(40, "own.py:5 in loss", call="all_gather", number=412)}, world_size=2)
    assert (
        "rank 0 waits in all_reduce #412 of 300 elements at train.py:9 in step; rank 1 waits in all_gather #412"
        in found
    )


def test_nobody_waits_for_anybody() -> None:
    alone = state(40, "data.py:3 in read", call="all_reduce", number=5, waits=False)
    assert sentence({0: alone}, world_size=1) == "no step for 12 s after step 40: rank 0 is at data.py:3 in read"


def test_the_phase_is_named() -> None:
    alone = state(40, "disk.py:3 in write", phase=SAVING)
    assert sentence({0: WAITS, 1: alone}, world_size=2).startswith(
        "no progress in a save for 12 s after step 40: rank 1 did not enter all_reduce #412"
    )


def test_each_phase_has_a_limit_of_its_own() -> None:
    gaps = Gaps()
    assert gaps.limit(STEPS, least=10.0) == 600.0, "nothing is known yet"
    for seconds in (60.0, *(0.5 for _ in range(98)), 5.0):
        gaps.noted(STEPS)(seconds)
    assert gaps.limit(STEPS, least=1.0) == 15.0, "of a hundred gaps the longest does not count"
    assert gaps.limit(STEPS, least=20.0) == 20.0
    gaps.noted(SAVING)(90.0)
    assert (gaps.limit(SAVING, least=10.0), gaps.limit(EVALUATING, least=10.0)) == (270.0, 600.0)
    for _ in range(500):
        gaps.noted(STEPS)(0.25)
    assert gaps.limit(STEPS, least=0.5) == 0.75, "gaps of long ago are forgotten"
    for seconds in (0.001, 30.0):
        gaps.noted(EVALUATING)(seconds)
        assert gaps.limit(EVALUATING, least=10.0) == 600.0, "the first gap is before a batch, the next one compiles"
    gaps.noted(EVALUATING)(0.1)
    assert gaps.limit(EVALUATING, least=10.0) == 90.0


def test_what_a_watch_knows_of_steps(tmp_path: Path) -> None:
    watch = HangWatch(None, rank=0, world_size=1, logs=tmp_path, end_seconds=0.0, least=10.0)
    ask = Watched(watch, lambda step: "")
    watch.enter(STEPS)
    found = []
    for step in (100, 101, 102):
        ask(step)
        with watch.during(SAVING):  # which ends a gap of the steps as well
            found.append((watch._limit(STEPS), watch._limit(SAVING)))
    assert found == [(600.0, 600.0), (600.0, 10.0), (10.0, 10.0)]
    watch.enter("")
    ask(103)
    assert watch.phase == "", "only the first question of a loop begins its steps"
    later = HangWatch(None, rank=0, world_size=1, logs=tmp_path, end_seconds=100.0, least=10.0)
    later.enter("")
    Watched(later, lambda step: "")(7)
    assert (later.phase, later._limit(STEPS)) == (STEPS, 50.0), "looked at in half the time to the end"


def test_the_place_is_the_users_line() -> None:
    def waiting() -> str:
        return re.sub(r"\(.*\)", "", place_of(sys._getframe()))

    line = waiting.__code__.co_firstlineno + 1
    assert waiting() == f"test_hang_watch.py:{line} in waiting"


SILENT = ("lock_held", "stopped")
WAYS = ("lock_held", "in_a_save", "dead_mount", "asleep", "endless_loop", "stopped", "data_worker")


@pytest.mark.slow
@pytest.mark.timing
def test_ways_to_hang(tmp_path: Path, warm: WarmRanks, exhaustive: bool) -> None:
    """The last one is no seed: two ranks are in collectives of different groups, until they are ended."""
    ways = WAYS if exhaustive else WAYS[:2]
    script = ROOT / "tests/jobs/hang_seeds.py"
    job = warm.start([str(tmp_path), *ways], num_ranks=2, folder=tmp_path / "said", script=script)
    codes = job.wait(300)
    stated = job.stated()
    found = dict(re.findall(r"seed: (\w*)\n(?:(?!seed: ).*\n)*?.*warning: (no .*)\n", stated))
    assert set(found) == {"", *ways}, stated[-6000:]
    assert stated.count("warning: no ") == len(found), "each is named once, and no save is taken for one"
    for name in ways:
        assert found[name].startswith("no progress in a save for" if name == "in_a_save" else "no step for"), found
        if name in SILENT:
            expected = r"rank 1 does not answer \(stopped, or Python's lock is held\); 1 other waits in all_reduce"
        else:
            expected = r"rank 1 did not enter all_reduce #\d+ of 300 elements, and is at hang_seeds.py:\d+ in " + name
        assert re.search(expected, found[name])
    assert re.search(r"rank 0 waits in all_reduce #\d+ of 300 elements.*rank 1 waits in all_reduce #1 of 7", found[""])
    assert "in lock_held" in (tmp_path / "logs/hang-rank1.txt").read_text(encoding="utf-8"), "written from C"
    assert all(codes)
