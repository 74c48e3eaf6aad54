"""Time spent training between two logged points, without evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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
