"""The time that each phase of a step takes on this rank, without waiting for the device.

At any moment a step is in one phase, so that the times of all phases add up to its own. On a CPU
they are read from the host's clock. On a GPU an event is put into the stream at the begin of a
phase, and the times between events are read at logged points, when the device has been waited for
anyway: a wait for data then counts as far as the device had nothing to do meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_ALLGATHER_TIMER
from deepspeed.utils.timer import NoopTimer

from framework.system.metric_names import REST, time_of

# Events that wait to be read; with more, the events that have passed are read.
_MOST_EVENTS: Final = 2000


class Phases:
    """Seconds of each phase since the last reading, by the host's clock.

    Attributes:
        current: phase of this moment; empty outside of a step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self.current = ""
        self._steps = 0

    def begin(self) -> None:
        """Begin a step."""
        self._mark(REST)  # the trainer adds the time between steps to it

    def end(self) -> None:
        """End a step; nothing is counted until the next one begins."""
        self._mark("")
        self._steps += 1

    def enter(self, phase: str) -> str:
        """Begin a phase, and return the one that ends by it, to go back to it. Outside of a step
        nothing happens.
        """
        before = self.current
        if before and phase != before:
            self._mark(phase)
        return before

    def during(self, phase: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call in a phase of its own, and go back to the one before."""
        before = self.enter(phase)
        result = call(*arguments, **named)
        self.enter(before)
        return result

    def read(self) -> dict[str, float]:
        """Return metrics ``time/<phase>_ms``: milliseconds per step since the last reading. Call it
        between steps, when the device has been waited for.
        """
        self._collect()
        steps = max(self._steps, 1)
        self._steps = 0
        metrics: dict[str, float] = {}
        for phase, seconds in self._seconds.items():
            if phase != REST:
                metrics[time_of(phase)] = 1000 * seconds / steps
        self._seconds.clear()
        return metrics

    def watch(self, note: Callable[[str], object]) -> None:
        """Call `note` with every phase that begins, and with an empty one where a step ends, until
        `unwatch`.
        """
        mark = self._mark

        def watched(phase: str) -> None:
            note(phase)
            mark(phase)

        # Replaced, so that other steps pay nothing for it.
        self._mark = watched  # type: ignore[method-assign]

    def unwatch(self) -> None:
        """End what `watch` began."""
        vars(self).pop("_mark", None)

    def moment(self) -> Any:
        """Note this moment of the device, for `between`."""
        return self._clock()

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments, once the device has been waited for."""
        return float(end - begin)

    def _mark(self, phase: str) -> None:
        """End the current phase and begin this one; an empty one ends the step."""
        now = self._clock()
        if self.current:
            self._seconds[self.current] += now - self._since
        self.current = phase
        self._since = now

    def _collect(self) -> None:
        """Read the times that are not read yet; here there are none."""


class EventPhases(Phases):
    """Seconds of each phase by events in the device's stream."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """`make_event` returns what torch.cuda.Event(enable_timing=True) does."""
        super().__init__()
        self._make_event = make_event
        self._free: list[Any] = []
        self._marks: deque[tuple[str, Any]] = deque()

    def begin(self) -> None:
        if len(self._marks) > _MOST_EVENTS:
            self._collect(is_passed=lambda event: event.query())
        super().begin()

    def moment(self) -> Any:
        if self._free:
            event = self._free.pop()
        else:
            event = self._make_event()
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, self.moment()))
        self.current = phase

    def _collect(self, is_passed: Callable[[Any], bool] = lambda event: True) -> None:
        """Add up the phases between events that the device has passed, and reuse these events."""
        while len(self._marks) > 1 and is_passed(self._marks[1][1]):
            phase, event = self._marks.popleft()
            if phase:
                self._seconds[phase] += event.elapsed_time(self._marks[0][1]) / 1000
            self._free.append(event)


def phases_of(engine: deepspeed.DeepSpeedEngine) -> Phases:
    """Make the phases of an engine, and have it enter those that only DeepSpeed's code begins: the
    sums of gradients that are left when the backward pass has ended, the gathering of weights after
    the optimizer (ZeRO stages 1 and 2), and the instructions of a pipeline.

    Other messages of DeepSpeed, during forward and backward pass as at stage 3, or in its
    optimizer, count as a part of these phases.
    """
    if engine.device.type == "cpu":
        phases = Phases()
    else:
        phases = EventPhases(partial(get_accelerator().Event, enable_timing=True))
    if torch.distributed.get_world_size() > 1:
        end_backward = engine._backward_epilogue
        engine._backward_epilogue = partial(phases.during, "communication", end_backward)
        if isinstance(getattr(engine.optimizer, "timers", None), NoopTimer):
            engine.optimizer.timers = _PhaseTimers(phases)
    if isinstance(engine, deepspeed.PipelineEngine):
        instructions: dict[Any, Any] = {}
        for kind, call in engine._INSTRUCTION_MAP.items():
            phase = _PHASE_OF_INSTRUCTION.get(kind, REST)
            instructions[kind] = _in_phase(phases, phase, call)
        engine._INSTRUCTION_MAP = instructions
    return phases


_PHASE_OF_INSTRUCTION: Final = {
    schedule.LoadMicroBatch: "copy",
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.ReduceGrads: "communication",
    schedule.ReduceTiedGrads: "communication",
    schedule.OptimizerStep: "optimizer",
    schedule.SendActivation: "bubble",
    schedule.RecvActivation: "bubble",
    schedule.SendGrad: "bubble",
    schedule.RecvGrad: "bubble",
}


def _in_phase(phases: Phases, phase: str, call: FunctionType) -> Callable[..., Any]:
    def instruction(engine: Any, *arguments: Any, **named: Any) -> Any:
        return phases.during(phase, call, engine, *arguments, **named)

    return instruction


class _PhaseTimers(NoopTimer):  # type: ignore[misc]
    """Stands in for the timers of a ZeRO optimizer that measure nothing; here one of them enters a
    phase.
    """

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._gathering = _PhaseTimer(phases)

    def __call__(self, name: str) -> Any:
        if name == OPTIMIZER_ALLGATHER_TIMER:
            return self._gathering
        return self.timer


class _PhaseTimer(NoopTimer.Timer):  # type: ignore[misc]
    """A timer that measures nothing: from `start` to `stop` the phase is "communication"."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._before = ""

    def start(self) -> None:
        self._before = self._phases.enter("communication")

    def stop(self, **options: Any) -> None:
        self._phases.enter(self._before)
