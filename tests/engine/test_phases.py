"""Phases of a step by a clock that the test moves, and by events of a device that does not
exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from deepspeed.utils.timer import NoopTimer

from framework.engine.phases import EventPhases, Phases, phases_of


@dataclass
class Device:
    """Milliseconds of the device, and how far it has come."""

    now: float = 0.0
    has_passed: float = float("inf")
    made: list[Event] = field(default_factory=list)

    def event(self) -> Event:
        self.made.append(Event(self))
        return self.made[-1]


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self._device.now

    def query(self) -> bool:
        return self.at <= self._device.has_passed

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at

    def synchronize(self) -> None:
        raise AssertionError("nothing waits")


@pytest.fixture(params=["clock", "events"])
def pair(request: pytest.FixtureRequest) -> tuple[Phases, Device]:
    device = Device()
    by_clock = request.param == "clock"
    return Phases(lambda: device.now / 1000) if by_clock else EventPhases(device.event), device


def step(phases: Phases, device: Device) -> None:
    """One step of 100 ms, 5 of them in no phase."""
    phases.begin()
    device.now += 3
    for phase, milliseconds in (("data", 20), ("copy", 5), ("forward", 30)):
        phases.enter(phase)
        device.now += milliseconds
    phases.enter("backward")
    device.now += 10
    phases.during("communication", lambda: setattr(device, "now", device.now + 15))
    device.now += 10
    before = phases.enter("other")
    device.now += 2
    assert phases.enter(before) == "other"
    phases.end()
    device.now += 1000  # an evaluation


def test_phases_are_means_of_the_steps_and_leave_out_what_is_between_them(
    pair: tuple[Phases, Device],
) -> None:
    phases, device = pair
    expected = {"data": 20, "copy": 5, "forward": 30, "backward": 20, "communication": 15}
    step(phases, device)
    step(phases, device)
    assert phases.read() == pytest.approx(
        {f"time/{name}_ms": value for name, value in expected.items()}
    )
    step(phases, device)
    assert phases.read() == pytest.approx(
        {f"time/{name}_ms": value for name, value in expected.items()}
    )
    assert phases.read() == {}


def test_outside_of_a_step_there_are_no_phases(pair: tuple[Phases, Device]) -> None:
    phases, device = pair
    assert phases.during("forward", lambda: 7) == 7
    device.now += 50
    assert phases.enter("optimizer") == ""
    assert phases.read() == {}
    assert not device.made


def test_events_are_used_again_and_those_that_have_passed_make_room() -> None:
    device = Device()
    phases = EventPhases(device.event)
    for _ in range(5):
        step(phases, device)
        phases.read()
    assert len(device.made) <= 11
    for number in range(1000):
        device.has_passed = device.now - 5000 if number else device.now
        step(phases, device)
    assert len(device.made) < 2100
    assert phases.read()["time/forward_ms"] == pytest.approx(30)


class Engine:
    """As much of DeepSpeed's as `phases_of` looks at."""

    def __init__(self) -> None:
        self.device, self.optimizer = torch.device("cpu"), SimpleNamespace(timers=NoopTimer())
        self.ended = 0

    def _backward_epilogue(self) -> None:
        self.ended += 1


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)


@pytest.mark.usefixtures("two_ranks")
def test_what_only_deepspeed_knows_is_communication() -> None:
    engine: Any = Engine()
    phases = phases_of(engine)
    phases.begin()
    phases.enter("backward")
    engine._backward_epilogue()
    assert engine.ended == 1
    phases.enter("optimizer")
    engine.optimizer.timers("optimizer_step").start()
    assert phases.enter("optimizer") == "optimizer"
    gathering = engine.optimizer.timers("optimizer_allgather")
    gathering.start()
    assert phases.enter("communication") == "communication"
    gathering.stop()
    assert phases.enter("optimizer") == "optimizer"
    engine.optimizer.timers.log(["optimizer_allgather"])
    phases.end()
    assert set(phases.read()) == {"time/backward_ms", "time/communication_ms", "time/optimizer_ms"}


@pytest.mark.usefixtures("two_ranks")
def test_timers_that_a_user_asked_for_stay() -> None:
    engine: Any = Engine()
    engine.optimizer.timers = asked = SimpleNamespace()
    phases_of(engine)
    assert engine.optimizer.timers is asked
