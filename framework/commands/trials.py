"""``plan CONFIG --trials 4``: train some steps of each of the best strategies, on this machine.

They take turns, so that other work on the machine meets them alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, Final

from framework.commands.timed_runs import INTERRUPTED, NO_TIMES, run_alone
from framework.errors import TrainingError, UsageError
from framework.plan.alternatives import settings_text
from framework.plan.candidate import Candidate
from framework.plan.plan import Plan
from framework.plan.search_space import unusual
from framework.report.series import Series
from framework.system.output import write

_ROUNDS: Final = 3
_STEPS: Final = 20
_LOG_EVERY: Final = 4
_LONGEST_SECONDS: Final = 600.0


@dataclass
class Trial:
    """One strategy, with the times of its steps or the reason why it does not run.

    Attributes:
        name: the settings in words.
        plan: of the run.
        estimate_seconds: of a step; None if it is not known.
        rounds: one list for each run: seconds of a step, one for every few steps, without the
            first few.
        failure: why it does not run; empty if it does.
    """

    name: str
    plan: Plan
    estimate_seconds: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    failure: str = ""

    @property
    def median_seconds(self) -> float | None:
        """Median of the rounds' medians; None if the strategy does not run."""
        if self.medians and not self.failure:
            return median(self.medians)
        return None

    @property
    def medians(self) -> list[float]:
        """Median of each round, the quickest first."""
        return sorted(median(seconds) for seconds in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": self.name,
            "estimate_seconds": self.estimate_seconds,
            "measured_seconds": self.median_seconds,
            "measurements": list(chain.from_iterable(self.rounds)),
            "round_seconds": self.medians,
            "failure": self.failure,
        }


def run_trials(candidates: Sequence[Candidate]) -> list[Trial]:
    """Run strategies in turn and wait, with progress on stderr; returns their trials.

    Raises:
        UsageError: they are for several hosts.
        TrainingError: none of them runs.
    """
    if any(candidate.plan.cluster.num_hosts > 1 for candidate in candidates):
        raise UsageError(
            "--trials runs on this machine alone; give --num_gpus N, the ranks on one host"
        )
    trials = [trial_of(candidate) for candidate in candidates]
    measure_trials(trials, note=lambda line: write(sys.stderr, f"{line}\n"))
    if not any(trial.median_seconds for trial in trials):
        raise _none_runs(trials)
    return trials


def _none_runs(trials: Sequence[Trial]) -> TrainingError:
    failures = "; ".join(f"{trial.name}: {trial.failure}" for trial in trials)
    if not failures:
        failures = "the search has found none"
    return TrainingError(f"--trials: no strategy runs on this machine: {failures} [trials-failed]")


def fastest(trials: Sequence[Trial]) -> int:
    """Return the index of the trial with the shortest median step; one of them must have run."""
    times = [
        (trial.median_seconds, number)
        for number, trial in enumerate(trials)
        if trial.median_seconds is not None
    ]
    return min(times)[1]


def within_noise(trials: Sequence[Trial]) -> bool:
    """Check whether the two fastest differ by no more than the rounds of one of them do."""
    times = sorted(
        (trial.median_seconds, trial.medians)
        for trial in trials
        if trial.median_seconds is not None
    )
    if len(times) < 2:
        return False
    (fastest_seconds, fastest_rounds), (second_seconds, second_rounds) = times[:2]
    spread = max(fastest_rounds[-1] - fastest_rounds[0], second_rounds[-1] - second_rounds[0])
    return second_seconds - fastest_seconds <= spread


def trial_of(candidate: Candidate) -> Trial:
    """Make the trial of a strategy."""
    name = settings_text(unusual(candidate.settings)) or "as planned"
    trial = Trial(name, candidate.plan)
    if candidate.time:
        trial.estimate_seconds = candidate.time.total
    return trial


def measure_trials(
    trials: Sequence[Trial], *, note: Callable[[str], None], rounds: int = _ROUNDS
) -> None:
    """Run all trials in turn, in every round, and call `note` with a line on each; one that fails
    is left out of later rounds.
    """
    for number in range(1, rounds + 1):
        for trial in trials:
            if not trial.failure:
                outcome = _run_round(trial)
                note(f"round {number} of {rounds}: {trial.name}: {outcome}")


def _run_round(trial: Trial) -> str:
    """Train some steps of a trial and wait; adds their times as a round, or the failure. Returns
    the outcome in words. KeyboardInterrupt after Ctrl-C.
    """
    run, trial.failure = run_alone(
        trial.plan, steps=_STEPS, log_every=_LOG_EVERY, longest_seconds=_LONGEST_SECONDS
    )
    if trial.failure == INTERRUPTED:
        raise KeyboardInterrupt
    if trial.failure:
        return trial.failure
    step_times = run.metrics.get("time/step_ms", Series()).values
    if not step_times:
        trial.failure = NO_TIMES
        return trial.failure
    seconds = [0.001 * step_ms for step_ms in step_times]
    trial.rounds.append(seconds[1:] or seconds)
    return f"{1000 * median(trial.rounds[-1]):.1f} ms a step"


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield lines with the estimate and the measurement of each trial; the fastest is marked. One
    of them must have run.
    """
    mark_of_fastest = "  <- fastest"
    if within_noise(trials):
        mark_of_fastest += ", within noise: try again, or take either of the two"
    best = trials[fastest(trials)]
    yield (
        f"{'trials':<10}step of each: median of {_ROUNDS} rounds of {_STEPS} steps, the first "
        f"{_LOG_EVERY} left out"
    )
    for trial in trials:
        line = f"          {trial.name}: estimate {_estimate(trial)}, measured {_measured(trial)}"
        if trial is best:
            line += mark_of_fastest
        yield line


def _estimate(trial: Trial) -> str:
    if trial.estimate_seconds is None:
        return "not known"
    return _milliseconds(trial.estimate_seconds)


def _measured(trial: Trial) -> str:
    """Return the median of a trial's step with the range of its rounds, or why it does not run."""
    if trial.median_seconds is None:
        return trial.failure
    low = f"{1000 * trial.medians[0]:,.1f}"
    high = f"{1000 * trial.medians[-1]:,.1f}"
    return f"{_milliseconds(trial.median_seconds)} ({low} to {high})"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
