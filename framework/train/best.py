"""The best value so far of the metric that `checkpoint.keep_best` names: of this process and of
those it goes on from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from framework.train.monitors.base import Point


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the step after which it was measured; of equal values the
    newest.
    """

    metric: str
    value: float
    step: int

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4f} at step {self.step}"


class BestSoFar:
    """Follows one metric, as a monitor does, but on every rank: what it finds is part of the state
    that is saved.
    """

    name = "best"

    def __init__(self, metric: str | None, *, best_is: Literal["max", "min"]) -> None:
        """Without a metric it follows nothing."""
        self._metric = metric
        self._best_is = best_is
        self.found: Best | None = None

    def write(self, point: Point) -> None:
        """Take one point. What is not finite is nobody's best."""
        if self._metric is not None:
            value = point.metrics.get(self._metric)
        else:
            value = None
        if self._metric is None or value is None or not math.isfinite(value):
            return
        sign = 1 if self._best_is == "max" else -1
        if self.found is None or sign * value >= sign * self.found.value:
            self.found = Best(self._metric, float(value), point.step)

    def close(self) -> None:
        """Nothing is held."""

    def state(self) -> dict[str, Any]:
        """Return the record of the best for a checkpoint; empty where there is none."""
        if self.found is None:
            return {}
        return {"best": {**asdict(self.found), "best_is": self._best_is}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint says. The best of another metric, or in the other direction,
        is none of this one.
        """
        saved = state.get("best")
        if isinstance(saved, Mapping) and (saved.get("metric"), saved.get("best_is")) == (
            self._metric,
            self._best_is,
        ):
            self.found = best_in(state)


def best_in(manifest: Mapping[str, Any]) -> Best | None:
    """Read the best so far from a checkpoint's manifest; None where its run followed no metric.

    Raises:
        LookupError, TypeError, ValueError: it says something else.
    """
    saved = manifest.get("best")
    if saved is None:
        return None
    return Best(str(saved["metric"]), float(saved["value"]), int(saved["step"]))
