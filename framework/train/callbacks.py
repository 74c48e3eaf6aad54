"""Callbacks: code of the user's own at the events of a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from framework.checkpoint.names import CALLBACKS
from framework.engine_protocol import Engine, Gather, WeightDoors
from framework.errors import TrainingError, in_one_line

EVENTS: Final = (
    "on_start",
    "on_gradients",
    "on_step",
    "on_log",
    "on_evaluation",
    "on_save",
    "on_end",
)
_REPORTED: Final = ("on_log", "on_evaluation")  # with a point that metrics can join


@dataclass
class Requests:
    """Requests of callbacks since the ranks last agreed on them."""

    stop: str = ""
    save: bool = False
    evaluate: bool = False
    lr_factor: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)
    failure: TrainingError | None = None
    """Error of a callback, which ends the run once the save that is due is written."""


@dataclass(frozen=True)
class State(WeightDoors):
    """A run as a callback sees it.

    A callback's requests, of any rank, are followed on all ranks at the next step that is logged,
    evaluated or saved.

    Attributes:
        step: optimizer steps taken.
        total_steps: of the whole run.
        epoch: passes over the data, as a fraction.
        metrics: ``area/name`` -> its last value; within `on_log` and `on_evaluation` the values of
            this step.
        is_main: whether this process is rank 0.
        model: the module as it is trained; at ZeRO stage 3 its weights are partitioned.
        requests: filled by the methods.
        engine: the engine with the weights; None in a run without one.
    """

    step: int
    total_steps: int
    epoch: float
    metrics: Mapping[str, float]
    is_main: bool
    model: Any
    requests: Requests
    engine: Engine | None = None

    def _source(self) -> Engine:
        assert self.engine is not None
        return self.engine

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
        """Multiply the learning rates of all later steps.

        The factor of the first rank that asks counts: usually all ask alike, and one change is
        meant. A scheduler other than ``constant`` sets its own rates again.
        """
        self.requests.lr_factor *= factor


class Callbacks:
    """The callbacks of a run, in their order. They are called on every rank, and the ranks agree on
    their requests.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        *,
        gather: Gather,
        is_main: bool,
        model: Any = None,
        scale_lr: Callable[[float], object] = lambda factor: None,
        engine: Engine | None = None,
        explain: Callable[[Exception], str] = lambda error: "",
    ) -> None:
        """Take objects with some of the methods of `EVENTS`.

        Args:
            callbacks: they may have ``state_dict()``, with plain values for each checkpoint, and
                ``load_state_dict(state)``.
            gather: a collective, for the requests.
            is_main: whether this is rank 0.
            model: the module that is trained.
            scale_lr: multiplies the optimizer's rates.
            engine: the engine, which has whole weights.
            explain: returns the line of a known failure, or nothing.
        """
        self._named = {
            f"{type(callback).__name__} {number}": callback
            for number, callback in enumerate(callbacks)
        }
        self._methods: dict[str, list[tuple[str, Callable[[State], object]]]] = {}
        for event in EVENTS:
            self._methods[event] = []
            for name, callback in self._named.items():
                method = getattr(callback, event, None)
                if callable(method):
                    self._methods[event].append((name, method))
        self._gather = gather
        self._is_main = is_main
        self._model = model
        self._scale_lr = scale_lr
        self._engine = engine
        self._explain = explain
        self._requests = Requests()

    def __bool__(self) -> bool:
        return bool(self._named)

    def hears(self, event: str) -> bool:
        """Check whether any callback has the method."""
        return bool(self._methods[event])

    def may_measure(self) -> bool:
        """Check whether a callback of the user's own is called at evaluations: it may log metrics
        that no evaluation gives.
        """
        from framework.train.metric_watch import MetricWatch

        callbacks = [self._named[name] for name, _ in self._methods["on_evaluation"]]
        return any(not isinstance(callback, MetricWatch) for callback in callbacks)

    def call(
        self,
        event: str,
        *,
        step: int,
        total_steps: int,
        epoch: float,
        metrics: Mapping[str, float],
        keeps_failure: bool = False,
    ) -> dict[str, float]:
        """Call the event's method of all callbacks that have it; returns the metrics that they log.

        With `keeps_failure` the error of a callback waits for `agreed`, and no further method is
        called until then.

        Raises:
            TrainingError: kind ``callback-failed``: one raised.
        """
        if self._requests.failure is not None:
            return {}
        state = State(
            step,
            total_steps,
            epoch,
            MappingProxyType(metrics),
            self._is_main,
            self._model,
            self._requests,
            self._engine,
        )
        for name, method in self._methods[event]:
            try:
                method(state)
            except Exception as error:
                message = f"step {step}: callback {name}: {event}{self._description(error)}"
                failed = TrainingError(message)
                failed.is_of_one_rank = True
                if not keeps_failure:
                    raise failed from error
                failed.__cause__ = error
                self._requests.failure = failed
                break
        if event not in _REPORTED:
            return {}
        logged = self._requests.metrics
        self._requests.metrics = {}
        return logged

    def _description(self, error: Exception) -> str:
        known = self._explain(error)
        if known:
            return f": {known}"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f" raised {in_one_line(error, longest=300)} "
            f"({frame.filename}:{frame.lineno}) [callback-failed]"
        )

    def agreed(self) -> Requests:
        """Return what any rank has requested since the last call, without metrics. Collective.

        The factor of the learning rates, of the first rank that has one, is applied here. Metrics
        stay for the next `call`.
        """
        own_requests = self._requests
        self._requests = Requests(metrics=own_requests.metrics)
        requests_of_ranks: list[Requests] = self._gather(own_requests)
        agreed = Requests()
        for requests in requests_of_ranks:
            if agreed.lr_factor == 1.0:
                agreed.lr_factor = requests.lr_factor
            agreed.stop = agreed.stop or requests.stop
            agreed.save = agreed.save or requests.save
            agreed.evaluate = agreed.evaluate or requests.evaluate
        agreed.failure = _first_failure(own_requests, requests_of_ranks)
        if agreed.lr_factor != 1.0:
            self._scale_lr(agreed.lr_factor)
        return agreed

    def agreed_failure(self) -> TrainingError | None:
        """Return the error of a callback on any rank since the last `agreed`. Collective."""
        return _first_failure(self._requests, self._gather(self._requests))

    def state(self) -> dict[str, Any]:
        """Return the callbacks' states for a checkpoint; empty if none has one."""
        states: dict[str, Any] = {}
        for name, callback in self._named.items():
            if hasattr(callback, "state_dict"):
                states[name] = callback.state_dict()
        if states:
            return {CALLBACKS: states}
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give each callback its state from a checkpoint, found by its class and number."""
        states = state.get(CALLBACKS) or {}
        for name, callback in self._named.items():
            if name in states and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(states[name])


def _first_failure(own: Requests, of_ranks: Sequence[Requests]) -> TrainingError | None:
    """Return this rank's own error, which has its traceback, or else the first of another rank."""
    for requests in (own, *of_ranks):
        if requests.failure is not None:
            return requests.failure
    return None
