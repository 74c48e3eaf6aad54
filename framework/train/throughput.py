"""Throughput between two logged points, and the watch over skipped steps and over losses.

Time spent training between two logged points, without evaluation and checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from framework.errors import TrainingError
from framework.system.log import warn

# Of a step: a wait of the loader that is longer stalls it.
_STALL: Final = 0.1


class Stopwatch:
    """Counts training time, samples and tokens; the clock is given, so that it can be tested
    without waiting.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        samples_per_step: int,
        tokens_per_step: int | None = None,
        per_step: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`per_step`: further metrics, as their amount in one step; each becomes an amount per
        second.
        """
        self._clock = clock
        self._samples_per_step = samples_per_step
        self._tokens_per_step = tokens_per_step
        self._per_step = per_step
        self._started = clock()
        self._excluded = 0.0
        self._waits: list[float] = []
        self.excluded_seconds = 0.0
        self._steps = 0
        self._intervals: list[tuple[int, float]] = []

    def begin(self) -> None:
        """The first step is about to begin: what was before is none of its time."""
        self._started = self._clock()
        self._excluded = 0.0

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with the wait for each of them noted."""
        clock = self._clock
        while True:
            before = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waits.append(clock() - before)
            yield batch

    @property
    def waited_seconds(self) -> float:
        """Time that batches were waited for since the last call of `read`."""
        return sum(self._waits)

    def step(self) -> None:
        """One optimizer step was issued."""
        self._steps += 1

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here is not training time; afterwards it is `excluded_seconds`."""
        before = self._clock()
        try:
            yield
        finally:
            self.excluded_seconds = self._clock() - before
            self._excluded += self.excluded_seconds

    def read(self, parts: Mapping[str, float] = MappingProxyType({})) -> Mapping[str, float]:
        """Metrics of the interval since the last call; call it after the device has been waited
        for.

        Args:
            parts: milliseconds per step that the engine knows, by metric; what they leave of a step
                is ``time/other_ms``. Without them only the wait for data is known.
        """
        now = self._clock()
        seconds = now - self._started - self._excluded
        steps = self._steps
        if not steps or seconds <= 0:
            return {}
        metrics = {
            "throughput/samples_per_sec": self._samples_per_step * steps / seconds,
            "time/step_ms": 1000 * seconds / steps,
            "time/data_ms": 1000 * sum(self._waits) / steps,
            "data/stalls": float(sum(wait > _STALL * seconds / steps for wait in self._waits)),
        }
        if parts:
            known = {"time/data_ms": metrics["time/data_ms"], **parts}
            metrics |= {
                **known,
                "time/other_ms": max(0.0, metrics["time/step_ms"] - sum(known.values())),
            }
        metrics |= {name: amount * steps / seconds for name, amount in self._per_step.items()}
        if self._tokens_per_step is not None:
            metrics["throughput/tokens_per_sec"] = self._tokens_per_step * steps / seconds
        self._intervals.append((steps, seconds))
        self._started = now
        self._excluded = 0.0
        self._steps = 0
        self._waits.clear()
        return metrics

    def samples_per_second(self) -> float:
        """Over the whole run; the first interval, which pays for warm-up, is left out where there
        are others.
        """
        return self._samples_per_step * self._steps_per_second()

    def tokens_per_second(self) -> float:
        """The same in tokens; 0 where the data has none."""
        return (self._tokens_per_step or 0) * self._steps_per_second()

    def _steps_per_second(self) -> float:
        intervals = self._intervals[1:] or self._intervals
        seconds = sum(seconds for _, seconds in intervals)
        if seconds:
            return sum(steps for steps, _ in intervals) / seconds
        return 0.0


# Losses that jump: OLMo 2 (2025, section 3.2) counts values far from the mean of those before them.

_WINDOW: Final = 128
_FEWEST_BEFORE: Final = 16
_SIGMAS: Final = 6.0


class SpikeScore:
    """Share of the last 128 logged losses that were more than six standard deviations off the mean
    of up to 128 before them. Losses that are not finite are off, and are no part of a mean.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._is_off: deque[bool] = deque(maxlen=_WINDOW)

    def note(self, loss: float | None) -> Mapping[str, float]:
        """Take a logged loss; returns ``train/spike_score``, from the 17th finite one on."""
        if loss is None:
            return {}
        is_finite = math.isfinite(loss)
        if len(self._losses) >= _FEWEST_BEFORE:
            count = len(self._losses)
            before = tuple(self._losses)
            mean = sum(before) / count
            deviation = math.dist(before, (mean,) * count) / math.sqrt(count)
            # Equal losses have no deviation but that of rounding.
            limit = _SIGMAS * deviation + 1e-6 * abs(mean)
            self._is_off.append(not is_finite or abs(loss - mean) > limit)
        if is_finite:
            self._losses.append(loss)
        if self._is_off:
            return {"train/spike_score": sum(self._is_off) / len(self._is_off)}
        return {}


# Steps that DeepSpeed skips because their gradients are not finite: some are a part of fp16, all of
# them train nothing. The loss may stay finite meanwhile (the gradient of a norm at zero is no
# number), so that nothing else would tell.


# In a row, and so many logged points as well: a few bad batches are no reason to end a run.
_ALLOWED_STEPS: Final = 20
_ALLOWED_POINTS: Final = 4
_UNTOLD_STEPS: Final = 4


class SkippedSteps:
    """Counts from one logged point to the next, from numbers that are read there anyway."""

    def __init__(self, start_step: int, cause: str = "its gradients were not finite") -> None:
        self._step = start_step
        self._cause = cause
        self._skipped: float | None = (
            None if start_step else 0.0
        )  # what a checkpoint has brought is told at the first point
        self._scale: float | None = None
        self._steps_in_row = self._points_in_row = 0
        self._is_reported = False

    def note(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> None:
        """Look at a logged point. On all ranks alike.

        Raises:
            TrainingError: kind ``every-step-skipped``: not one of many steps was taken, or none of
                the whole run.
        """
        skipped = metrics.get("train/skipped_steps", 0.0)
        scale = metrics.get("train/loss_scale")
        steps = step - self._step
        # In fp16 the scale falls until gradients fit: those steps are skipped for a while, and
        # rightly.
        may_be_falling = scale is not None and scale != self._scale
        if self._skipped is None or not steps or skipped - self._skipped < steps or may_be_falling:
            self._steps_in_row = self._points_in_row = 0
        else:
            self._steps_in_row = self._steps_in_row + steps
            self._points_in_row = self._points_in_row + 1
        self._step = step
        self._skipped = skipped
        self._scale = scale
        if not self._points_in_row:
            return
        of_all = is_last and self._steps_in_row == step
        if of_all or (
            self._points_in_row > _ALLOWED_POINTS and self._steps_in_row >= _ALLOWED_STEPS
        ):
            raise TrainingError(
                f"{self._what(step)}, and nothing is trained; {_ADVICE} [every-step-skipped]"
            )
        if self._steps_in_row > _UNTOLD_STEPS and not self._is_reported:
            self._is_reported = True
            warn(f"{self._what(step)}; {_ADVICE} [every-step-skipped]", is_of_all_ranks=True)

    def _what(self, step: int) -> str:
        return (
            f"step {step}: each of the last {self._steps_in_row} steps was skipped, because "
            f"{self._cause}"
        )


_ADVICE: Final = (
    "look for a root, a norm or a division at zero in the model or the loss, or lower optimizer.lr"
)
