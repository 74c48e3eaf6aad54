"""Throughput between two logged points, and the watch over skipped steps.

Time spent training between two logged points, without evaluation and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from framework.errors import TrainingError
from framework.system.log import warn


class Stopwatch:
    """Counts training time, samples and tokens; the clock is given, so that it can be tested without waiting."""

    def __init__(
        self, clock: Callable[[], float], *, samples_per_step: int, tokens_per_step: int | None = None
    ) -> None:
        self._clock = clock
        self._samples_per_step, self._tokens_per_step = samples_per_step, tokens_per_step
        self._started = clock()
        self._excluded = self._data_seconds = 0.0
        self._steps = 0
        self._intervals: list[tuple[int, float]] = []

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with the wait for each of them added to the data time."""
        clock = self._clock
        while True:
            before = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_seconds += clock() - before
            yield batch

    def step(self) -> None:
        """One optimizer step was issued."""
        self._steps += 1

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here is not training time."""
        before = self._clock()
        try:
            yield
        finally:
            self._excluded += self._clock() - before

    def read(self) -> Mapping[str, float]:
        """Metrics of the interval since the last call; call it after the device has been waited for."""
        now = self._clock()
        seconds, steps = now - self._started - self._excluded, self._steps
        if not steps or seconds <= 0:
            return {}
        metrics = {
            "throughput/samples_per_sec": self._samples_per_step * steps / seconds,
            "time/step_ms": 1000 * seconds / steps,
            "time/data_ms": 1000 * self._data_seconds / steps,
        }
        if self._tokens_per_step is not None:
            metrics["throughput/tokens_per_sec"] = self._tokens_per_step * steps / seconds
        self._intervals.append((steps, seconds))
        self._started, self._excluded, self._data_seconds, self._steps = now, 0.0, 0.0, 0
        return metrics

    def samples_per_second(self) -> float:
        """Over the whole run; the first interval, which pays for warm-up, is left out where there are others."""
        return self._samples_per_step * self._steps_per_second()

    def tokens_per_second(self) -> float:
        """The same in tokens; 0 where the data has none."""
        return (self._tokens_per_step or 0) * self._steps_per_second()

    def _steps_per_second(self) -> float:
        intervals = self._intervals[1:] or self._intervals
        seconds = sum(seconds for _, seconds in intervals)
        return sum(steps for steps, _ in intervals) / seconds if seconds else 0.0


# Steps that DeepSpeed skips because their gradients are not finite: some are a part of fp16, all of them train
# nothing. The loss may stay finite meanwhile (the gradient of a norm at zero is no number), so that nothing else
# would tell.


# In a row, and so many logged points as well: a few bad batches are no reason to end a run.
_ALLOWED_STEPS: Final = 20
_ALLOWED_POINTS: Final = 4
_UNTOLD_STEPS: Final = 4


class SkippedSteps:
    """Counts from one logged point to the next, from numbers that are read there anyway."""

    def __init__(self, start_step: int) -> None:
        self._step = start_step
        self._skipped: float | None = (
            None if start_step else 0.0
        )  # what a checkpoint has brought is told at the first point
        self._scale: float | None = None
        self._steps_in_row = self._points_in_row = 0
        self._is_reported = False

    def note(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> None:
        """Look at a logged point. On all ranks alike.

        Raises:
            TrainingError: kind ``every-step-skipped``: not one of many steps was taken, or none of the whole run.
        """
        skipped, scale = metrics.get("train/skipped_steps", 0.0), metrics.get("train/loss_scale")
        steps = step - self._step
        # In fp16 the scale falls until gradients fit: those steps are skipped for a while, and rightly.
        may_be_falling = scale is not None and scale != self._scale
        if self._skipped is None or not steps or skipped - self._skipped < steps or may_be_falling:
            self._steps_in_row = self._points_in_row = 0
        else:
            self._steps_in_row, self._points_in_row = self._steps_in_row + steps, self._points_in_row + 1
        self._step, self._skipped, self._scale = step, skipped, scale
        if not self._points_in_row:
            return
        of_all = is_last and self._steps_in_row == step
        if of_all or (self._points_in_row > _ALLOWED_POINTS and self._steps_in_row >= _ALLOWED_STEPS):
            raise TrainingError(f"{self._what(step)}, and nothing is trained; {_ADVICE} [every-step-skipped]")
        if self._steps_in_row > _UNTOLD_STEPS and not self._is_reported:
            self._is_reported = True
            warn(f"{self._what(step)}; {_ADVICE} [every-step-skipped]", is_of_all_ranks=True)

    def _what(self, step: int) -> str:
        return (
            f"step {step}: each of the last {self._steps_in_row} steps was skipped, "
            "because its gradients were not finite"
        )


_ADVICE: Final = "look for a root, a norm or a division at zero in the model or the loss, or lower optimizer.lr"
