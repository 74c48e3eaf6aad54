"""Throughput between two logged points, and the watch over losses and over skipped steps.

Evaluations and checkpoints do not count as training time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from framework.errors import TrainingError
from framework.system.log import warn
from framework.system.metric_names import REST, time_of

# Share of a step's time: a longer wait for the loader is a stall.
_STALL: Final = 0.1


class Stopwatch:
    """Counts training time, samples and tokens; the clock is an argument, so that tests need not
    wait.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        samples_per_step: int,
        tokens_per_step: int | None = None,
        per_step: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Start to count.

        `per_step`: metric -> amount in one step; the metric is logged as the amount per second.
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
        """Start anew before the first step: the time until here does not count."""
        self._started = self._clock()
        self._excluded = 0.0

    def note_wait(self, seconds: float) -> None:
        """Count the time that was waited for a batch."""
        self._waits.append(seconds)

    @property
    def waited_seconds(self) -> float:
        """Time that batches were waited for since the last call of `read`."""
        return sum(self._waits)

    def step(self) -> None:
        """Count an optimizer step that was issued."""
        self._steps += 1

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time of the block out of training time; afterwards `excluded_seconds` has
        it.
        """
        before = self._clock()
        try:
            yield
        finally:
            self.excluded_seconds = self._clock() - before
            self._excluded += self.excluded_seconds

    def read(self, parts: Mapping[str, float] = MappingProxyType({})) -> Mapping[str, float]:
        """Return the metrics of the interval since the last call, and begin the next interval. An
        interval without a step has none, and goes on.

        Call it after the device has finished its work.

        Args:
            parts: milliseconds per step that the engine has measured, by metric. The rest of a step
                is ``time/other_ms``. Without `parts` only the wait for data is known.
        """
        now = self._clock()
        seconds = now - self._started - self._excluded
        steps = self._steps
        if not steps or seconds <= 0:
            return {}
        step_ms = 1000 * seconds / steps
        data_ms = 1000 * sum(self._waits) / steps
        stalls = sum(wait > _STALL * seconds / steps for wait in self._waits)
        metrics = {
            "throughput/samples_per_sec": self._samples_per_step * steps / seconds,
            "time/step_ms": step_ms,
            "time/data_ms": data_ms,
            "data/stalls": float(stalls),
        }
        if parts:
            known_ms = {"time/data_ms": data_ms} | dict(parts)
            metrics.update(known_ms)
            metrics[time_of(REST)] = max(0.0, step_ms - sum(known_ms.values()))
        for name, amount in self._per_step.items():
            metrics[name] = amount * steps / seconds
        if self._tokens_per_step is not None:
            metrics["throughput/tokens_per_sec"] = self._tokens_per_step * steps / seconds
        self._intervals.append((steps, seconds))
        self._started = now
        self._excluded = 0.0
        self._steps = 0
        self._waits.clear()
        return metrics

    def samples_per_second(self) -> float:
        """Return the mean of the run so far, after its first interval, which has the warm-up.

        Of a single interval it is the mean of that.
        """
        return self._samples_per_step * self._steps_per_second()

    def tokens_per_second(self) -> float:
        """Return `samples_per_second` in tokens; 0 for data without tokens."""
        if self._tokens_per_step is None:
            return 0.0
        return self._tokens_per_step * self._steps_per_second()

    def _steps_per_second(self) -> float:
        intervals = self._intervals[1:] or self._intervals
        seconds = sum(seconds for _, seconds in intervals)
        if seconds:
            return sum(steps for steps, _ in intervals) / seconds
        return 0.0


# Losses that jump: OLMo 2 (2025, section 3.2) counts values far from the mean of earlier ones.

_WINDOW: Final = 128
_FEWEST_BEFORE: Final = 16
_SIGMAS: Final = 6.0


class SpikeScore:
    """Share of the last 128 logged losses that were off: more than six standard deviations from the
    mean of up to 128 losses before them.

    Losses that are not finite are off, and are no part of a mean.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._is_off: deque[bool] = deque(maxlen=_WINDOW)

    def note(self, loss: float | None) -> Mapping[str, float]:
        """Take a logged loss; returns ``train/spike_score``, from the 17th finite loss on."""
        if loss is None:
            return {}
        is_finite = math.isfinite(loss)
        if len(self._losses) >= _FEWEST_BEFORE:
            count = len(self._losses)
            losses = tuple(self._losses)
            mean = sum(losses) / count
            deviation = math.dist(losses, (mean,) * count) / math.sqrt(count)
            # Equal losses deviate by rounding alone.
            limit = _SIGMAS * deviation + 1e-6 * abs(mean)
            self._is_off.append(not is_finite or abs(loss - mean) > limit)
        if is_finite:
            self._losses.append(loss)
        if self._is_off:
            return {"train/spike_score": sum(self._is_off) / len(self._is_off)}
        return {}


# Steps that DeepSpeed skips because their gradients are not finite. In fp16 a few are normal; a run
# that skips all of them trains nothing. The loss may stay finite meanwhile (the gradient of a norm
# at zero is NaN), so that no other check would find it.


# Skipped steps in a row, and logged points in a row: a few bad batches are no reason to end a run.
_ALLOWED_STEPS: Final = 20
_ALLOWED_POINTS: Final = 4
_STEPS_WITHOUT_WARNING: Final = 4


class SkippedSteps:
    """Finds runs that skip every step, from one logged point to the next; it needs no further
    numbers from the device.
    """

    def __init__(self, start_step: int, cause: str = "its gradients were not finite") -> None:
        self._step = start_step
        self._cause = cause
        # Steps that were skipped up to the last logged point. After a resume the first point shows
        # how many the checkpoint brought along.
        self._skipped: float | None = None
        if start_step == 0:
            self._skipped = 0.0
        self._scale: float | None = None
        self._steps_in_row = 0
        self._points_in_row = 0
        self._is_reported = False

    def note(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> None:
        """Look at a logged point, and warn once of more than 4 skipped steps in a row; called on
        all ranks alike.

        Raises:
            TrainingError: kind ``every-step-skipped``: all of many steps in a row were skipped, or
                all of the whole run.
        """
        skipped = metrics.get("train/skipped_steps", 0.0)
        scale = metrics.get("train/loss_scale")
        steps = step - self._step
        # In fp16 the scale falls until gradients fit: until then, skipped steps are right.
        may_be_falling = scale is not None and scale != self._scale
        if self._skipped is None or not steps or skipped - self._skipped < steps or may_be_falling:
            self._steps_in_row = 0
            self._points_in_row = 0
        else:
            self._steps_in_row += steps
            self._points_in_row += 1
        self._step = step
        self._skipped = skipped
        self._scale = scale
        if not self._points_in_row:
            return
        is_whole_run = is_last and self._steps_in_row == step
        are_too_many = (
            self._points_in_row > _ALLOWED_POINTS and self._steps_in_row >= _ALLOWED_STEPS
        )
        if is_whole_run or are_too_many:
            raise TrainingError(
                f"{self._finding(step)}, and nothing is trained; {_ADVICE} [every-step-skipped]"
            )
        if self._steps_in_row > _STEPS_WITHOUT_WARNING and not self._is_reported:
            self._is_reported = True
            warn(f"{self._finding(step)}; {_ADVICE} [every-step-skipped]", is_of_all_ranks=True)

    def _finding(self, step: int) -> str:
        return (
            f"step {step}: each of the last {self._steps_in_row} steps was skipped, because "
            f"{self._cause}"
        )


_ADVICE: Final = (
    "look for a root, a norm or a division at zero in the model or the loss, or lower optimizer.lr"
)
