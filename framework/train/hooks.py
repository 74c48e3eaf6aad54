"""What a Trainer calls: the parts of a run that follow its loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from framework.engine_protocol import StepProfile, Table
from framework.system.stopping import GO_ON, Decision
from framework.system.waiting import waiting
from framework.train.cadence import Minutes
from framework.train.callbacks import Callbacks

if TYPE_CHECKING:
    from framework.train.bad_step_policy import BadStepPolicy

Save = Callable[[int, Mapping[str, float]], object]
"""Writes a checkpoint of a step with its metrics; returns False if it could not."""


def _go_on(step: int) -> Decision:
    return GO_ON


def _accept(names: Collection[str]) -> None:
    """Accept any names of metrics."""


def _keep_nothing(step: int, tables: Mapping[str, Table]) -> None:
    """Keep no tables."""


def _no_phase(phase: str) -> str:
    return ""


def record_nothing(kind: str, step: int, **details: object) -> None:
    """Record no event, as on all ranks but rank 0."""


@dataclass(frozen=True)
class Hooks:
    """What a Trainer calls, by its moment; each may be left out.

    Attributes:
        save: writes a checkpoint of a step; None: nothing is saved.
        stop: called before the first step, after every step but the last, and between the batches
            of an evaluation, alike on all ranks. A stop ends the run there; evaluations and saves
            are done after the next step.
        minutes: evaluations and saves by the clock; `stop` reports when one is due.
        enter: called with each phase of the run as it begins; returns the phase before it.
        record: records an event by kind and step (`train.events.Events`).
        show_weights: shows the weights of a step; collective, its time is not the steps'.
        keep_tables: keeps metrics of a step that are matrices, by name; called on rank 0.
        measured: called with the names of the first evaluation's metrics; refuses those that the
            run follows and that are not among them.
        callbacks: called at the events of the run.
        profile: profiles some steps.
        bad_steps: policy for steps with bad numbers; None: a loss that is not finite ends the run.
    """

    save: Save | None = None
    stop: Callable[[int], Decision] = _go_on
    minutes: Minutes = field(default_factory=Minutes)
    enter: Callable[[str], str] = _no_phase
    record: Callable[..., object] = record_nothing
    show_weights: Callable[[int], object] | None = None
    keep_tables: Callable[[int, Mapping[str, Table]], object] = _keep_nothing
    measured: Callable[[Collection[str]], object] = _accept
    callbacks: Callbacks | None = None
    profile: StepProfile | None = None
    bad_steps: BadStepPolicy | None = None


class FirstStep:
    """Messages about what the first step of a start waits for: a batch, or the step's own work."""

    def __init__(self) -> None:
        self.is_over = False
        self._wait = ExitStack()

    def wait_for_batch(self) -> None:
        """Begin to wait for a micro-batch."""
        self._wait_for("the first batch of the training data")

    def compute(self) -> None:
        """Begin the work that follows a micro-batch."""
        self._wait_for("the first step, in which kernels are compiled")

    def end(self) -> None:
        """End the messages for good."""
        self._wait.close()
        self.is_over = True

    def _wait_for(self, what: str) -> None:
        if not self.is_over:
            self._wait.close()
            self._wait.enter_context(waiting(what))
