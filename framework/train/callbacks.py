"""Callbacks: the user's own code at the events of a run, and the two that are in the box."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from framework.checkpoint.names import CALLBACKS
from framework.engine.protocol import Gather
from framework.errors import TrainingError, counted, in_one_line

EVENTS: Final = ("on_start", "on_step", "on_log", "on_evaluation", "on_save", "on_end")
_REPORTED: Final = ("on_log", "on_evaluation")  # with a point that metrics can join


@dataclass
class Requests:
    """What callbacks have asked for since it was last looked at."""

    stop: str = ""
    save: bool = False
    evaluate: bool = False
    lr_factor: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """A run as a callback sees it. What it asks for happens on all ranks, at the next step that is
    logged, evaluated or saved, whichever rank has asked.

    Attributes:
        step: optimizer steps taken.
        total_steps: of the whole run.
        epoch: passes over the data, as a fraction.
        metrics: ``area/name`` -> its last value; with `on_log` and `on_evaluation` those of this
            step.
        is_main: whether this process is rank 0.
        model: the module as it is trained; at ZeRO stage 3 its weights are spread.
        requests: filled by the methods.
        gathering: what `gathered` calls.
    """

    step: int
    total_steps: int
    epoch: float
    metrics: Mapping[str, float]
    is_main: bool
    model: Any
    requests: Requests
    gathering: Callable[..., AbstractContextManager[Any]] = nullcontext

    def gathered(self, module: Any = None) -> AbstractContextManager[Any]:
        """Return a context in which the weights of the model, or of one of its modules, are whole
        at every ZeRO stage. What all ranks write into them alike is kept. Collective: on every
        rank, or on none.
        """
        return self.gathering(module)

    def stop(self, reason: str = "") -> None:
        """End the run as if this were its last step: evaluated and saved where that is due at the
        end.
        """
        self.requests.stop = reason or "a callback asked for it"

    def save(self) -> None:
        """Write a checkpoint."""
        self.requests.save = True

    def evaluate(self) -> None:
        """Measure the evaluation data."""
        self.requests.evaluate = True

    def log(self, **metrics: float) -> None:
        """Add metrics to the next logged point, to this one within `on_log` and `on_evaluation`;
        rank 0's count. ``log(**{"mine/value": 1.0})``.
        """
        self.requests.metrics |= {name: float(value) for name, value in metrics.items()}

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rates, and those of all later steps; with a scheduler other than
        ``constant`` the schedule sets its own again.
        """
        self.requests.lr_factor *= factor


class Callbacks:
    """The callbacks of a run, in their order: called on every rank, their requests agreed on
    between the ranks.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        *,
        gather: Gather,
        is_main: bool,
        model: Any = None,
        scale_lr: Callable[[float], object] = lambda factor: None,
        gathered: Callable[..., AbstractContextManager[Any]] = nullcontext,
        explain: Callable[[Exception], str] = lambda error: "",
    ) -> None:
        """Take objects with some of the methods of `EVENTS`.

        Args:
            callbacks: may have ``state_dict()`` and ``load_state_dict(state)``, whose plain values
                are part of each checkpoint.
            gather: a collective, for the requests.
            is_main: whether this is rank 0.
            model: what is trained.
            scale_lr: multiplies the optimizer's rates.
            gathered: makes weights whole.
            explain: returns the line of a known failure, or nothing.
        """
        self._named = [
            (f"{type(one).__name__} {number}", one) for number, one in enumerate(callbacks)
        ]
        self._calls = {
            event: [
                (name, getattr(one, event))
                for name, one in self._named
                if callable(getattr(one, event, None))
            ]
            for event in EVENTS
        }
        self._gather = gather
        self._is_main = is_main
        self._model = model
        self._scale_lr = scale_lr
        self._gathered = gathered
        self._explain = explain
        self._requests = Requests()

    def __bool__(self) -> bool:
        return bool(self._named)

    def hears(self, event: str) -> bool:
        """Check whether any of them has the method."""
        return bool(self._calls[event])

    def call(
        self, event: str, *, step: int, total_steps: int, epoch: float, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Call that method of all that have it; returns the metrics that they log.

        Raises:
            TrainingError: kind ``callback-failed``: one raised.
        """
        view = MappingProxyType(metrics)
        state = State(
            step,
            total_steps,
            epoch,
            view,
            self._is_main,
            self._model,
            self._requests,
            self._gathered,
        )
        for name, method in self._calls[event]:
            try:
                method(state)
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                known = self._explain(error)
                line = (
                    f" raised {in_one_line(error, longest=300)} "
                    f"({frame.filename}:{frame.lineno}) [callback-failed]"
                )
                failed = TrainingError(
                    f"step {step}: callback {name}: {event}{f': {known}' if known else line}"
                )
                failed.is_of_one_rank = True
                raise failed from error
        if event not in _REPORTED:
            return {}
        logged, self._requests.metrics = self._requests.metrics, {}
        return logged

    def agreed(self) -> Requests:
        """What any rank has asked for, once; rates are scaled here. Collective."""
        own = self._requests
        self._requests = Requests(metrics=self._requests.metrics)
        everyone: list[Requests] = self._gather(own)
        factor = everyone[0].lr_factor
        if factor != 1.0:
            self._scale_lr(factor)
        return Requests(
            stop=next((each.stop for each in everyone if each.stop), ""),
            save=any(each.save for each in everyone),
            evaluate=any(each.evaluate for each in everyone),
        )

    def state(self) -> dict[str, Any]:
        """Return what they keep, for a checkpoint; empty where none does."""
        kept = {name: one.state_dict() for name, one in self._named if hasattr(one, "state_dict")}
        return {CALLBACKS: kept} if kept else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give back what a checkpoint holds of those that are there under the same name and
        place.
        """
        kept = state.get(CALLBACKS) or {}
        for name, one in self._named:
            if name in kept and hasattr(one, "load_state_dict"):
                one.load_state_dict(kept[name])


class _Watch:
    """Base of what follows the best value of an evaluated metric."""

    def __init__(
        self,
        metric: str = "eval/loss",
        best_is: Literal["min", "max"] = "min",
        patience: int = 3,
        min_change: float = 0,
    ) -> None:
        self._metric = metric
        self._sign = 1.0 if best_is == "max" else -1.0
        self._patience = patience
        self._min_change = min_change
        self._best: float | None = None
        self._waited = 0

    def on_evaluation(self, state: State) -> None:
        """Compare this evaluation with the best before it."""
        value = state.metrics.get(self._metric)
        if value is None:
            known = ", ".join(sorted(name for name in state.metrics if name.startswith("eval/")))
            raise LookupError(f"no metric {self._metric} is measured; there are {known}")
        if math.isfinite(value) and (
            self._best is None or self._sign * (value - self._best) > self._min_change
        ):
            self._best = value
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self._is_due(state)

    def _is_due(self, state: State) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]
        self._waited = state["waited"]


class EarlyStopping(_Watch):
    """Ends a run whose evaluated metric has not become better for `patience` evaluations."""

    def on_start(self, state: State) -> None:
        """End at once where an earlier start of the run was ended."""
        if self._waited >= self._patience:
            self._is_due(state)

    def _is_due(self, state: State) -> None:
        waited = counted(self._waited, "evaluation")
        best = self._best
        if best is None:
            shown = "never was a number"
        else:
            shown = f"has not been better than {best:.4g}"
        state.stop(f"{self._metric} {shown} for {waited}")


class ReduceOnPlateau(_Watch):
    """Multiplies the learning rate by `factor` where the metric has not become better for
    `patience` evaluations.
    """

    def __init__(self, factor: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self._factor = factor

    def _is_due(self, state: State) -> None:
        state.scale_lr(self._factor)
        self._waited = 0
