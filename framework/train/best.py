"""The best value of the metric that `checkpoint.keep_best` names, over all starts of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from framework.train.monitors.base import Point


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the step after which it was measured; the newest of equal
    values.
    """

    metric: str
    value: float
    step: int

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4f} at step {self.step}"


class BestSoFar:
    """Follows one metric, as a monitor does, but on every rank: the best is part of the saved
    state.
    """

    name = "best"

    def __init__(self, metric: str | None, *, best_is: Literal["max", "min"]) -> None:
        """Follow `metric`; None: nothing is followed."""
        self._metric = metric
        self._best_is = best_is
        self.found: Best | None = None

    def write(self, point: Point) -> None:
        """Take one point; a value that is not finite is never the best."""
        if self._metric is None:
            return
        value = point.metrics.get(self._metric)
        if value is None or not math.isfinite(value):
            return
        sign = 1 if self._best_is == "max" else -1
        if self.found is None or sign * value >= sign * self.found.value:
            self.found = Best(self._metric, float(value), point.step)

    def close(self) -> None:
        """Nothing is held."""

    def state(self) -> dict[str, Any]:
        """Return the record of the best for a checkpoint; empty if there is none."""
        if self.found is None:
            return {}
        record = asdict(self.found)
        record["best_is"] = self._best_is
        return {"best": record}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the best in a checkpoint, if it is of this metric and direction."""
        saved = state.get("best")
        if not isinstance(saved, Mapping):
            return
        if saved.get("metric") == self._metric and saved.get("best_is") == self._best_is:
            self.found = best_in(state)


def best_in(manifest: Mapping[str, Any]) -> Best | None:
    """Read the best so far from a checkpoint's manifest; None if its run followed no metric.

    Raises:
        LookupError, TypeError, ValueError: the manifest's record is not of this form.
    """
    saved = manifest.get("best")
    if saved is None:
        return None
    return Best(str(saved["metric"]), float(saved["value"]), int(saved["step"]))
