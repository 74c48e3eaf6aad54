"""Goodput, against figures worked out by hand, and against the ledger of an hour that was
simulated.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from framework.report.figures import goodput_line
from framework.report.goodput import goodput
from framework.report.records import read_run
from framework.train.events import carry_over
from tests.campaign.simulated_hour import hour
from tests.report.made_runs import START, points, write_run


def test_goodput_of_a_run_without_events(tmp_path: Path) -> None:
    """20 points of 5 steps of 100 ms: 10 s of steps, of which 4 % wait; clock and steps agree, but
    for nothing else.
    """
    found = goodput(read_run(write_run(tmp_path / "run", events=None)))
    assert found is not None
    assert found.parts == {"training": pytest.approx(9.6), "waiting for data": pytest.approx(0.4)}
    assert found.share == pytest.approx(0.96)


@pytest.mark.parametrize("lost_step", [False, True])
def test_goodput_of_a_run_that_was_killed_and_went_on(tmp_path: Path, lost_step: bool) -> None:
    """Saved at 50, killed after an evaluation at 60, gone 100 s, resumed at 50; an event that has
    lost its step changes nothing.
    """
    events: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start"},
        {"time_seconds": START + 10.5, "step": 50, "kind": "save", "seconds": 0.5},
        {"time_seconds": START + 11.5, "step": 60, "kind": "evaluate", "seconds": 0.5},
        {"time_seconds": START + 111.5, "step": 50, "kind": "resume"},
        {"time_seconds": START + 120, "step": 100, "kind": "end"},
    ]
    if lost_step:
        del events[2]["step"]
    lines = [
        each if each["step"] <= 50 else each | {"time": START + 113.5 + each["step"] / 10}
        for each in points(range(5, 101, 5))
    ]
    found = goodput(read_run(write_run(tmp_path / "run", lines=lines, events=events)))
    assert found is not None
    parts = dict(found.parts)
    assert parts.pop("between restarts") == pytest.approx(100.0)
    assert parts.pop("steps taken again") == pytest.approx(1.0), (
        "with the evaluation, which was worth nothing either"
    )
    assert parts.pop("start-up") == pytest.approx(5.0)
    assert parts.pop("saving") == pytest.approx(0.5)
    assert parts.pop("training") == pytest.approx(9.6)
    assert parts.pop("waiting for data") == pytest.approx(0.4)
    assert parts.pop("ending") == pytest.approx(3.5)
    assert set(parts) == {"other"}
    assert found.total == pytest.approx(123.5)  # to the last point
    assert goodput_line(found) == (
        "7.8% of 2 min 04 s: between restarts 1 min 40 s (1), training 9.6 s, start-up 5 s, other 3.5 s, ending 3.5 s"
    )


def test_all_that_events_hold(tmp_path: Path) -> None:
    """A process of 2 s begins, evaluates, compiles, saves, calls back and ends; what was slow is no
    hang.
    """
    events: list[dict[str, Any]] = [
        {"time_seconds": START + 2, "step": 0, "kind": "start", "seconds": 2.0},
        {"time_seconds": START + 4, "step": 0, "kind": "evaluate", "seconds": 1.5},
        {"time_seconds": START + 8.2, "step": 1, "kind": "first_step", "seconds": 3.2},
        {"time_seconds": START + 30, "step": 50, "kind": "hang", "seconds": 12.0},
        {"time_seconds": START + 32.2, "step": 100, "kind": "save", "seconds": 1.0},
        {
            "time_seconds": START + 32.2,
            "step": 100,
            "kind": "hang",
            "seconds": 0.25,
            "phase": "a save",
        },
        {"time_seconds": START + 33, "step": 100, "kind": "callbacks", "seconds": 0.7},
        {"time_seconds": START + 33, "step": 100, "kind": "end", "is_finished": True},
        {"time_seconds": START + 37, "step": 100, "kind": "closed"},
    ]
    lines = [
        each | {"time": START + 5 + 0.26 * each["step"]} for each in points(range(50, 101, 50))
    ]
    # two of them are evaluations
    for line, milliseconds in zip(lines, (320.0, None, 200.0, None), strict=True):
        line |= {"time/step_ms": milliseconds, "time/data_ms": 4.0} if milliseconds else {}
    found = goodput(read_run(write_run(tmp_path / "run", lines=lines, events=events)))
    assert found is not None
    compiling = 3.2 - 0.2 - 0.2  # without the waits of its interval, and a usual step
    assert found.parts == pytest.approx(
        {
            "start-up": 5.0 - 1.5,
            "evaluation": 1.5,
            "compiling": compiling,
            "training": 26.0 - 0.4 - compiling,
            "waiting for data": 0.4,
            "saving": 1.0,
            "callbacks": 0.7,
            "ending": 4.0,
            "other": 37.0 - 5.0 - 26.0 - 1.7 - 4.0,
        }
    )


def test_a_run_that_was_stopped_and_resumed_has_not_failed(tmp_path: Path) -> None:
    stop = {"step": 50, "is_finished": False, "kind": "end"}
    events: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start", "seconds": 1.0},
        {"time_seconds": START + 12, **stop},
        {"time_seconds": START + 12.5, "step": 50, "kind": "closed"},
        {"time_seconds": START + 1012.5, "step": 50, "kind": "resume", "seconds": 10.0},
        {"time_seconds": START + 1012.6, "step": 51, "kind": "first_step", "seconds": 0.1},
        {"time_seconds": START + 1018, "step": 100, "kind": "end", "is_finished": True},
    ]
    lines = [
        each if each["step"] <= 50 else each | {"time": START + 1007.5 + each["step"] / 10}
        for each in points(range(5, 101, 5))
    ]
    found = goodput(read_run(write_run(tmp_path / "run", lines=lines, events=events)))
    assert found is not None
    assert found.parts["stopped"] == pytest.approx(990.0)
    assert found.parts["ending"] == pytest.approx(0.5)
    assert found.restarts == 0
    assert found.parts.keys().isdisjoint({"between restarts", "steps taken again"})
    assert found.total == pytest.approx(1019.0)


def test_a_start_that_has_saved_nothing_counts(tmp_path: Path) -> None:
    """Its folder was moved aside, and the job goes on in a new one; another job's is no part of
    it.
    """
    first: list[dict[str, Any]] = [
        {"time_seconds": START, "step": 0, "kind": "start", "seconds": 3.0},
        {"time_seconds": START + 1, "step": 1, "kind": "first_step", "seconds": 0.5},
        {"time_seconds": START + 9, "step": 0, "kind": "restart", "seconds": 12.5},
    ]
    # the point is of START + 5.5
    before = write_run(tmp_path / "before", lines=points([5]), events=first)
    after = write_run(tmp_path / "after", events=[])
    carry_over(before, after)
    shift = [each | {"time": each["time"] + 20} for each in points(range(5, 101, 5))]
    (after / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shift))
    with (after / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time_seconds": START + 25, "step": 0, "kind": "start", "seconds": 10.0})
            + "\n"
        )
        file.write(
            json.dumps(
                {"time_seconds": START + 25.1, "step": 1, "kind": "first_step", "seconds": 0.1}
            )
            + "\n"
        )
    found = goodput(read_run(after))
    assert found is not None
    assert (found.restarts, found.parts["start-up"]) == (1, pytest.approx(3.5 + 10.0))
    assert found.parts["steps taken again"] == pytest.approx(5.0)
    assert found.parts["between restarts"] == pytest.approx(9.5)
    assert found.total == pytest.approx(38.0)
    (before / "events.jsonl").write_text(json.dumps(first[0]) + "\n")
    carry_over(before, other := write_run(tmp_path / "other", events=[]))
    assert (other / "events.jsonl").read_text() == ""


@pytest.mark.slow
def test_an_hour_of_failures_every_two_minutes(tmp_path: Path) -> None:
    found, job = hour(tmp_path, every_seconds=4.9, save_seconds=0.1)
    parts, spent = found.parts, job.ledger
    assert found.restarts == 29
    assert found.share >= 0.9
    assert found.total == pytest.approx(3600.0, rel=0.01)
    assert parts["training"] + parts["compiling"] == pytest.approx(spent["kept"], abs=0.01 * 3600)
    assert parts["steps taken again"] == pytest.approx(spent["lost"], rel=0.02)
    assert parts["saving"] == pytest.approx(spent["saving"], rel=0.02)
    assert parts["start-up"] + parts["between restarts"] == pytest.approx(spent["down"], rel=0.02)
    assert parts.get("other", 0.0) < 0.001 * found.total


STEP_SECONDS = 0.1


class Ledger:
    """A job that is made up second by second: what each was spent on, and the records that a run
    leaves of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = START
        self.spent: Counter[str] = Counter()
        self.events: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.step = 0
        self._interval: list[tuple[float, float]] = []

    def spend(self, category: str, seconds: float) -> None:
        self.now += seconds
        self.spent[category] += seconds

    def note(self, kind: str, **details: Any) -> None:
        self.events.append({"time_seconds": self.now, "step": self.step, "kind": kind} | details)

    def start(self, *, kind: str = "start", evaluates: float = 0.0, **details: Any) -> None:
        self.spend("start-up", 2.0)
        self.note(kind, seconds=2.0, **details)
        self.spend("start-up", 3.0)
        if evaluates:
            self.beside("evaluate", evaluates)

    def beside(self, kind: str, seconds: float) -> None:
        names = {"evaluate": "evaluation", "save": "saving"}
        self.spend(names.get(kind, kind), seconds)
        self.note(kind, seconds=seconds)

    def take_first(self, *, waits: float, compiles: float) -> None:
        self.take(waits=waits, works=compiles + STEP_SECONDS, logs=False)
        self.spent["compiling"] += compiles
        self.spent["training"] -= compiles
        self.note("first_step", seconds=waits + compiles + STEP_SECONDS, data_seconds=waits)

    def take(
        self, count: int = 1, *, waits: float = 0.0, works: float = STEP_SECONDS, logs: bool = True
    ) -> None:
        for _ in range(count):
            self.step += 1
            self.spend("waiting for data", waits)
            self.spend("training", works)
            self._interval.append((waits, waits + works))
            if logs:
                self.log()

    def log(self) -> None:
        num = len(self._interval)
        data = sum(wait for wait, _ in self._interval) / num
        total = sum(seconds for _, seconds in self._interval) / num
        metrics = {"time/step_ms": 1000 * total, "time/data_ms": 1000 * data}
        self.lines.append({"step": self.step, "epoch": 0.0, "time": self.now} | metrics)
        self._interval.clear()

    def end(self) -> None:
        self.note("end", is_finished=True)
        self.spend("ending", 1.5)
        self.note("closed")

    def parts(self) -> dict[str, float]:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        found = goodput(
            read_run(write_run(self.folder / "run", lines=self.lines, events=self.events))
        )
        assert found is not None
        assert found.total == pytest.approx(sum(self.spent.values()), rel=0.01)
        return dict(found.parts)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("evaluates", [0.0, 8.0])
@pytest.mark.parametrize(
    ("waits", "compiles"), [(20.0, 0.0), (0.0, 30.0), (60.0, 15.0), (0.0, 0.0)]
)
def test_a_slow_first_batch_is_no_compiling_and_counts_once(
    tmp_path: Path, waits: float, compiles: float, evaluates: float, every: int
) -> None:
    job = Ledger(tmp_path)
    job.start(evaluates=evaluates)
    job.take_first(waits=waits, compiles=compiles)
    if every == 1:
        job.log()
    for _ in range(60):
        job.take(logs=every == 1 or (job.step + 1) % every == 0)
    job.beside("save", 2.0)
    if every != 1:
        job.take(9)
    job.end()
    expected = {name: seconds for name, seconds in job.spent.items() if seconds > 0.01}
    found = {name: seconds for name, seconds in job.parts().items() if seconds > 0.01}
    assert found == pytest.approx(expected, rel=0.02, abs=0.2)


def test_slow_is_no_hang_and_what_did_not_end_by_itself_is(tmp_path: Path) -> None:
    """A save of a minute and a callback of 45 s went well, each with a warning; then the job stood
    still to its end.
    """
    job = Ledger(tmp_path)
    job.start()
    job.take_first(waits=0.0, compiles=1.0)
    job.take(20)
    job.beside("save", 60.0)
    job.note("hang", seconds=59.5, phase="a save")
    job.take(10)
    job.beside("callbacks", 45.0)
    job.note("hang", seconds=44.0, phase="the callbacks")
    job.take(5, works=20.0)
    job.note("hang", seconds=19.5, phase="steps")
    job.take(10)
    job.spend("hanging", 30.0)
    job.note("hang", seconds=30.0, phase="steps")
    parts = job.parts()
    assert parts["hanging"] == pytest.approx(30.0)
    assert parts["saving"] == pytest.approx(60.0)
    assert parts["callbacks"] == pytest.approx(45.0)
    assert parts["training"] == pytest.approx(job.spent["training"], rel=0.01)
    # Restarted from the save: all after it was lost, but for the hang, which has its own class.
    job.spend("between restarts", 4.0)
    after = 20.0 + 45.0 + 10 * STEP_SECONDS + 10 * STEP_SECONDS + 80.0
    lost = 10 * STEP_SECONDS + 45.0 + 5 * 20.0 + 10 * STEP_SECONDS
    assert lost == pytest.approx(after)
    job.lines = [line for line in job.lines if line["step"] <= 21]
    job.step = 21
    job.start(kind="resume")
    job.take_first(waits=0.0, compiles=1.0)
    job.take(40)
    job.end()
    parts = job.parts()
    assert parts["hanging"] == pytest.approx(30.0)
    assert parts["steps taken again"] == pytest.approx(lost)
    assert parts["between restarts"] == pytest.approx(4.0)


@pytest.mark.parametrize("jump", [365 * 86_400.0, -365 * 86_400.0, 3600.0, -30.0])
@pytest.mark.parametrize("has_boot", [True, False])
def test_a_clock_that_was_set_between_two_starts(
    tmp_path: Path, jump: float, has_boot: bool
) -> None:
    """Within a start stamps go on by themselves; from one to the next the clock of the machine
    decides.
    """

    def boot(job: Ledger, moved: float) -> dict[str, Any]:
        if not has_boot:
            return {}
        return {"boot": "1f2e", "boot_seconds": job.now + 2.0 - moved - START + 1000.0}

    job = Ledger(tmp_path)
    job.start(**boot(job, 0.0))
    job.take_first(waits=0.0, compiles=1.0)
    job.take(20)
    job.beside("save", 1.0)
    job.take(10)
    job.now += jump
    lines = [line for line in job.lines if line["step"] <= 21]
    job.lines = lines
    job.now += 4.0
    job.step = 21
    job.start(kind="resume", **boot(job, jump))
    job.take_first(waits=0.0, compiles=1.0)
    job.take(40)
    job.end()
    found = goodput(read_run(write_run(job.folder / "run", lines=job.lines, events=job.events)))
    assert found is not None
    parts = dict(found.parts)
    assert parts["training"] == pytest.approx(62 * STEP_SECONDS, rel=0.01)
    # What was not saved was never told of but by points that are gone.
    down = parts.get("between restarts", 0.0)
    if has_boot:
        assert down == pytest.approx(4.0 + 10 * STEP_SECONDS)
        assert found.total == pytest.approx(sum(job.spent.values()) + 4.0, rel=0.01)
    elif jump < 0:
        assert down == 0.0
    else:
        assert down == pytest.approx(jump + 4.0 + 10 * STEP_SECONDS)


def test_points_that_a_full_disk_has_cost_are_training_all_the_same(tmp_path: Path) -> None:
    """Of 60 steps the first 11 have points; saves and evaluations go on."""
    job = Ledger(tmp_path)
    job.start()
    job.take_first(waits=0.0, compiles=1.0)
    job.log()
    for _ in range(12):
        job.take(5)
        job.beside("save", 0.5)
    job.end()
    job.lines = [line for line in job.lines if line["step"] <= 11]
    parts = job.parts()
    assert parts["training"] == pytest.approx(6.1, rel=0.03)
    assert parts["saving"] == pytest.approx(6.0)
    job.lines = []
    assert job.parts()["training"] + job.parts().get("compiling", 0.0) == pytest.approx(
        7.1, rel=0.03
    )


def test_a_stop_that_was_asked_for_in_a_hang_leaves_it_one(tmp_path: Path) -> None:
    job = Ledger(tmp_path)
    job.start()
    job.take_first(waits=0.0, compiles=1.0)
    job.take(20)
    job.take(works=30.0 + STEP_SECONDS)
    job.note("hang", seconds=30.0, phase="steps")
    job.note("stop", signal="SIGTERM")
    job.beside("save", 1.0)
    job.end()
    assert job.parts()["hanging"] == pytest.approx(30.0)
    job.events = [
        event | {"kind": "slow"} if event["kind"] == "hang" else event for event in job.events
    ]
    parts = job.parts()
    assert "hanging" not in parts
    assert parts["training"] == pytest.approx(job.spent["training"], rel=0.01)
