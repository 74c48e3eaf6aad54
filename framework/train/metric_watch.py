"""The callbacks that the framework brings: they follow the best value of an evaluated metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from framework.errors import counted

if TYPE_CHECKING:
    from framework.train.callbacks import State


class MetricWatch:
    """Base of callbacks that follow the best value of an evaluated metric."""

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
        """Compare this evaluation with the best before it, and act after `patience` that were not
        better.

        Raises:
            LookupError: the metric is not measured.
        """
        value = state.metrics.get(self._metric)
        if value is None:
            known = ", ".join(sorted(name for name in state.metrics if name.startswith("eval/")))
            raise LookupError(f"no metric {self._metric} is measured; there are {known}")
        if math.isfinite(value) and self._is_better(value):
            self._best = value
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self._act(state)

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        return self._sign * (value - self._best) > self._min_change

    def _act(self, state: State) -> None:
        """Do what is due when the metric has not become better for `patience` evaluations."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]
        self._waited = state["waited"]


class EarlyStopping(MetricWatch):
    """Ends a run after `patience` evaluations in which its metric has not become better."""

    def on_start(self, state: State) -> None:
        """End the run at once if its earlier start, from which this one goes on, was ended."""
        if self._waited >= self._patience:
            self._act(state)

    def _act(self, state: State) -> None:
        waited = counted(self._waited, "evaluation")
        if self._best is None:
            finding = "never was a number"
        else:
            finding = f"has not been better than {self._best:.4g}"
        state.stop(f"{self._metric} {finding} for {waited}")


class ReduceOnPlateau(MetricWatch):
    """Multiplies the learning rate by `factor` after `patience` evaluations in which the metric has
    not become better.
    """

    def __init__(self, factor: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self._factor = factor

    def _act(self, state: State) -> None:
        state.scale_lr(self._factor)
        self._waited = 0
