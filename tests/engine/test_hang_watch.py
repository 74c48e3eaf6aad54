"""A run whose steps stop coming says within seconds which rank keeps the others waiting, and where
it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.engine import hang_watch
from framework.engine.hang_watch import Gaps, HangWatch, Watched
from framework.engine.rank_states import compiles, place_of, sentence
from framework.engine_protocol import EVALUATING, SAVING, STEPS
from tests.launched import ROOT
from tests.warm_ranks import WarmRanks


def state(
    step: int,
    place: str,
    *,
    call: str = "",
    number: int = 0,
    waits: bool = True,
    phase: str = STEPS,
) -> dict[str, Any]:
    calls = (
        {"gloo 0": {"number": number, "name": call, "elements": 300, "waits": waits}}
        if call
        else {}
    )
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
    found = sentence(
        {0: WAITS, 1: state(40, "own.py:5 in loss", call="all_gather", number=412)}, world_size=2
    )
    assert (
        "rank 0 waits in all_reduce #412 of 300 elements at train.py:9 in step; rank 1 waits in all_gather #412"
        in found
    )


def test_no_rank_waits_for_another() -> None:
    alone = state(40, "data.py:3 in read", call="all_reduce", number=5, waits=False)
    assert (
        sentence({0: alone}, world_size=1)
        == "no step for 12 s after step 40: rank 0 is at data.py:3 in read"
    )


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
        assert gaps.noted_first(EVALUATING, seconds)
        assert gaps.limit(EVALUATING, least=10.0) == 600.0, (
            "the first gap is before a batch, the next one compiles"
        )
    assert not gaps.noted_first(EVALUATING, 0.1)
    gaps.noted(EVALUATING)(0.1)
    assert gaps.limit(EVALUATING, least=10.0) == 10.0, "a slow first batch makes no later hang wait"


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
    assert (later.phase, later._limit(STEPS)) == (STEPS, 50.0), (
        "looked at in half the time to the end"
    )


class Clock:
    """Stands where `time` does in the watch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now)


def watch_of(folder: Path, **terms: Any) -> HangWatch:
    return HangWatch(
        None, rank=0, world_size=1, logs=folder, **({"end_seconds": 0.0, "least": 10.0} | terms)
    )


@pytest.mark.parametrize("first", [40.0, 300.0])
def test_a_slow_first_step_makes_no_later_hang_wait(
    first: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(hang_watch, "_num_compiled", lambda: 0)  # other tests may compile
    watch = watch_of(tmp_path)
    ask = Watched(watch, lambda step: "")
    watch.enter(STEPS)
    for step, seconds in enumerate((first, 0.3, 0.3, 0.3)):
        ask(step)
        clock.now += seconds
    ask(4)
    assert watch._limit(STEPS) == 10.0
    monkeypatch.setattr(hang_watch, "_num_compiled", lambda: 1)
    clock.now += first  # another shape: torch.compile compiles again
    ask(5)
    assert watch._limit(STEPS) == 10.0
    clock.now += 20.0
    ask(6)
    assert watch._limit(STEPS) == 60.0, "of what was not compiled, the longest counts"


def looked(watch: HangWatch, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Let the thread of a watch look so often."""
    left = [False] * times + [True]
    monkeypatch.setattr(watch, "_closing", SimpleNamespace(wait=lambda _: left.pop(0)))
    watch._watch()


@pytest.fixture
def stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Stalled:
    return Stalled(tmp_path, monkeypatch)


class Stalled:
    """A watch whose steps have stopped coming; what it writes as events, and with which code it
    ends its process.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.events, self.codes, self.at_prompt = "", [], [], False
        self.clock, self._monkeypatch = Clock(monkeypatch), monkeypatch
        monkeypatch.setattr(
            hang_watch, "report_event", lambda kind, **values: self.events.append((kind, values))
        )
        monkeypatch.setattr(hang_watch.os, "_exit", self.codes.append)
        monkeypatch.setattr(hang_watch, "is_at_prompt_of", lambda _: self.at_prompt)
        monkeypatch.setattr(hang_watch, "collectives", dict)
        self.watch = watch_of(folder, end_seconds=100.0, stop_request=lambda: self.asked)
        self.ask = Watched(self.watch, lambda step: "")
        self.watch.enter(STEPS)
        for step in range(6):
            self.ask(step)
            self.clock.now += 0.1

    def look(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        looked(self.watch, self._monkeypatch)


@pytest.mark.parametrize(
    ("phase", "kind"), [(STEPS, "hang"), (SAVING, "slow"), ("a callback", "slow")]
)
def test_what_goes_on_by_itself_was_slow(
    stalled: Stalled, phase: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with stalled.watch.during(phase):
        stalled.look(700.0 if phase != STEPS else 12.0)
        assert f"[{kind}]" in capfd.readouterr().err
    stalled.ask(6)
    stalled.codes.clear()  # a save of 700 s is let be, steps of 12 s as well
    stalled.look()
    ((event, values),) = stalled.events
    assert (event, values["phase"]) == ("slow", phase)
    assert stalled.codes == []


@pytest.mark.parametrize("comes_first", ["hang", "request"])
def test_a_stop_in_a_hang_ends_at_once(
    stalled: Stalled, comes_first: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if comes_first == "request":
        stalled.asked = "SIGTERM"
        stalled.look(5.0)
        assert stalled.codes == [], "the step may still come"
    stalled.look(12.0)
    assert "[hang]" in capfd.readouterr().err
    stalled.asked = "SIGTERM"
    stalled.look()
    assert set(stalled.codes) == {77}
    assert stalled.events[0][0] == "hang"
    assert "SIGTERM: no step for 1" in capfd.readouterr().err or comes_first == "request"


def test_a_stop_in_a_slow_save_waits_for_it_and_in_a_callback_for_a_minute(
    stalled: Stalled,
) -> None:
    with stalled.watch.during(SAVING):
        stalled.look(700.0)
        stalled.asked = "SIGTERM"
        stalled.look()
        stalled.look(120.0)
        assert stalled.codes == []
    with stalled.watch.during("a callback"):
        stalled.look(700.0)
        assert stalled.codes == [77], "it was asked long ago"


def test_a_process_in_a_debugger_is_left_alone(
    stalled: Stalled, capfd: pytest.CaptureFixture[str]
) -> None:
    stalled.at_prompt = True
    for _ in range(5):
        stalled.look(600.0)
    assert (capfd.readouterr().err, stalled.codes, stalled.events) == ("", [], [])
    stalled.at_prompt = False
    stalled.look(5.0)
    assert capfd.readouterr().err == ""
    stalled.look(6.0)
    assert "warning: no step for 11 s" in capfd.readouterr().err


def test_a_rank_that_compiles_is_not_named() -> None:
    compiling = state(40, "model.py:3 in forward") | {"compiles": True}
    assert compiles({0: WAITS, 1: compiling})
    assert not compiles({0: WAITS, 1: compiling | {"seconds": 700.0}})
    assert not compiles({0: WAITS, 1: state(40, "model.py:3 in forward")})


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
    """The last one is no seed: two ranks are in collectives of different groups, until they are
    ended.
    """
    ways = WAYS if exhaustive else WAYS[:2]
    script = ROOT / "tests/jobs/hang_seeds.py"
    job = warm.start([str(tmp_path), *ways], num_ranks=2, folder=tmp_path / "said", script=script)
    codes = job.wait(300)
    stated = job.stated()
    found = dict(re.findall(r"seed: (\w*)\n(?:(?!seed: ).*\n)*?.*warning: (no .*)\n", stated))
    assert set(found) == {"", *ways}, stated[-6000:]
    assert stated.count("warning: no ") == len(found), (
        "each is named once, and no save is taken for one"
    )
    for name in ways:
        assert found[name].startswith(
            "no progress in a save for" if name == "in_a_save" else "no step for"
        ), found
        if name in SILENT:
            expected = r"rank 1 does not answer \(stopped, or Python's lock is held\); 1 other waits in all_reduce"
        else:
            expected = (
                r"rank 1 did not enter all_reduce #\d+ of 300 elements, and is at hang_seeds.py:\d+ in "
                + name
            )
        assert re.search(expected, found[name])
    assert re.search(
        r"rank 0 waits in all_reduce #\d+ of 300 elements.*rank 1 waits in all_reduce #1 of 7",
        found[""],
    )
    assert "in lock_held" in (tmp_path / "logs/hang-rank1.txt").read_text(encoding="utf-8"), (
        "written from C"
    )
    assert all(codes)
