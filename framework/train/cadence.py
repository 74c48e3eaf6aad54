"""When something is due in a run: after which steps, and by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from framework.system.stopping import GO_ON, TIME_IS_UP, Action, Decision


@dataclass(frozen=True)
class Every:
    """Steps at which something happens.

    Attributes:
        every_steps: interval between two of them; 0: none before the end.
        at_end: also after the last step.
        at_start: also before the first step.
        start_step: steps before it do not count, but for the start.
    """

    every_steps: int = 0
    at_end: bool = False
    at_start: bool = False
    start_step: int = 0

    @staticmethod
    def of(
        *,
        every_steps: int | None,
        every_epochs: int | None,
        steps_per_epoch: int,
        at_end: bool = False,
        at_start: bool = False,
        start_step: int = 0,
    ) -> Every:
        """Make a cadence from the fields of a config section; steps win over epochs."""
        interval = every_steps or 0
        if not interval and every_epochs:
            interval = every_epochs * steps_per_epoch
        return Every(interval, at_end=at_end, at_start=at_start, start_step=start_step)

    def is_due(self, step: int, *, total_steps: int) -> bool:
        """Check whether it happens after this step, counted from 1."""
        if step == 0:
            return self.at_start or (self.at_end and total_steps == 0)
        if self.at_end and step == total_steps:
            return True
        has_interval_ended = self.every_steps > 0 and step % self.every_steps == 0
        return has_interval_ended and step >= self.start_step


class Minutes:
    """Evaluations, saves and the end of a run by the clock; another thread may call `due`."""

    def __init__(
        self,
        often: Mapping[Action, float | None] = MappingProxyType({}),
        *,
        most: float | None = None,
        began: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count minutes.

        Args:
            often: minutes between two evaluations and two saves, counted from now.
            most: length of the run, counted from `began`; None: without end.
            began: time of the clock at which the run began.
            clock: seconds.
        """
        self._clock = clock
        self._seconds: dict[Action, float] = {}
        self._due_at: dict[Action, float] = {}
        now = clock()
        for action, minutes in often.items():
            if minutes is not None:
                self._seconds[action] = 60 * minutes
                self._due_at[action] = now + 60 * minutes
        if most is not None:
            self._due_at[Action.STOP] = began + 60 * most

    def due(self) -> Decision:
        """Return what is due: the end of the run at every call, an evaluation or a save once, and
        again only after its `restart`.
        """
        if not self._due_at:
            return GO_ON
        now = self._clock()
        for action, moment in self._due_at.items():
            if now < moment:
                continue
            if action is Action.STOP:
                return TIME_IS_UP
            self._due_at[action] = math.inf
            return Decision(action)
        return GO_ON

    def restart(self, action: Action) -> None:
        """Count the minutes to the next `action` from now: this one has happened."""
        if action in self._seconds:
            self._due_at[action] = self._clock() + self._seconds[action]


@dataclass(frozen=True)
class Schedule:
    """Length of the run, and the steps at which something happens.

    Attributes:
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps in one pass over the data.
        samples_per_step: global batch size.
        log: when metrics are read.
        evaluate: when evaluation data is measured.
        save: when a checkpoint is written.
        show_weights: when histograms of the weights are shown.
        not_finite_allowed: how many logged losses in a row may be NaN or infinite before the run
            ends: in fp16 one that overflows costs its step and no more.
        tokens_per_step: tokens in a global batch; None for data without tokens.
        per_step: metric of a rate -> the amount in one step, such as floating-point operations.
    """

    total_steps: int
    steps_per_epoch: int
    samples_per_step: int
    log: Every
    evaluate: Every
    save: Every
    show_weights: Every = Every()
    not_finite_allowed: int = 0
    tokens_per_step: int | None = None
    per_step: Mapping[str, float] = field(default_factory=dict)
