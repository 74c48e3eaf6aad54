"""``plan CONFIG --trials 4``: the best strategies of the search for some steps each, on the devices
at hand.

They take turns, so that what else the machine does meets them alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from framework.commands.strategies import unusual
from framework.commands.timed_runs import INTERRUPTED, run_alone
from framework.errors import TrainingError, UsageError
from framework.plan.alternatives import settings_text
from framework.plan.plan import Plan
from framework.plan.search import Candidate
from framework.system.output import write

_ROUNDS: Final = 3
_STEPS: Final = 20
_LOG_EVERY: Final = 4
_LONGEST_SECONDS: Final = 600.0


@dataclass
class Trial:
    """One strategy: its steps as they were measured, or why there are none.

    Attributes:
        name: the settings in words.
        plan: of the run.
        estimate_seconds: of a step; None where it is not known.
        rounds: of each run seconds of a step, one for every few steps, without the first few.
        failure: why it does not run; empty where it does.
    """

    name: str
    plan: Plan
    estimate_seconds: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    failure: str = ""

    @property
    def median_seconds(self) -> float | None:
        """Median of the rounds' medians; None where it does not run."""
        if self.medians and not self.failure:
            return median(self.medians)
        return None

    @property
    def medians(self) -> list[float]:
        """Median of each round, the quickest first."""
        return sorted(median(seconds) for seconds in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, each named as what it is."""
        return {
            "settings": self.name,
            "estimate_seconds": self.estimate_seconds,
            "measured_seconds": self.median_seconds,
            "measurements": [seconds for one in self.rounds for seconds in one],
            "round_seconds": self.medians,
            "failure": self.failure,
        }


def run_trials(candidates: Sequence[Candidate]) -> list[Trial]:
    """Try strategies in turn; each line of progress goes to stderr.

    Raises:
        UsageError: they are for several hosts.
        TrainingError: none of them runs.
    """
    if any(each.plan.cluster.num_hosts > 1 for each in candidates):
        raise UsageError(
            "--trials runs on this machine alone; give --num_gpus N, the ranks on one host"
        )
    trials = [trial_of(candidate) for candidate in candidates]
    measure_trials(trials, note=lambda line: write(sys.stderr, f"{line}\n"))
    if not any(trial.median_seconds for trial in trials):
        failures = (
            "; ".join(f"{trial.name}: {trial.failure}" for trial in trials)
            or "the search has found none"
        )
        raise TrainingError(
            f"--trials: no strategy runs on this machine: {failures} [trials-failed]"
        )
    return trials


def fastest(trials: Sequence[Trial]) -> int:
    """Place of the trial with the shortest median step."""
    found = (
        (each.median_seconds, number)
        for number, each in enumerate(trials)
        if each.median_seconds is not None
    )
    return min(found)[1]


def within_noise(trials: Sequence[Trial]) -> bool:
    """Check whether the two fastest differ by no more than the rounds of one of them do."""
    found = sorted(
        (each.median_seconds, each.medians) for each in trials if each.median_seconds is not None
    )[:2]
    return len(found) > 1 and found[1][0] - found[0][0] <= max(
        medians[-1] - medians[0] for _, medians in found
    )


def trial_of(candidate: Candidate) -> Trial:
    """Make the trial of a strategy."""
    seconds = candidate.time.total if candidate.time else None
    return Trial(
        settings_text(unusual(candidate.settings)) or "as planned", candidate.plan, seconds
    )


def measure_trials(
    trials: Sequence[Trial], *, note: Callable[[str], None], rounds: int = _ROUNDS
) -> None:
    """Run all of them in turn, as often as there are rounds; what fails is left out of later
    rounds.
    """
    for number in range(rounds):
        for trial in trials:
            if not trial.failure:
                _run(trial)
                took = trial.failure or f"{1000 * median(trial.rounds[-1]):.1f} ms a step"
                note(f"round {number + 1} of {rounds}: {trial.name}: {took}")


def _run(trial: Trial) -> None:
    """One run more; its intervals are a round."""
    done, trial.failure = run_alone(
        trial.plan, steps=_STEPS, log_every=_LOG_EVERY, longest_seconds=_LONGEST_SECONDS
    )
    if trial.failure == INTERRUPTED:
        raise KeyboardInterrupt
    if not trial.failure:
        steps = [0.001 * took for took in done.metrics["time/step_ms"].values]
        trial.rounds.append(steps[1:] or steps)


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """Lines for a person: estimate and measurement of each, the fastest marked."""
    best = fastest(trials)
    is_noise = within_noise(trials)
    yield (
        f"{'trials':<10}step of each: median of {_ROUNDS} rounds of {_STEPS} steps, the first "
        f"{_LOG_EVERY} left out"
    )
    for number, trial in enumerate(trials):
        if trial.estimate_seconds is None:
            estimate = "not known"
        else:
            estimate = f"{1000 * trial.estimate_seconds:,.1f} ms"
        seconds = trial.median_seconds
        low, *_, high = [f"{1000 * each:,.1f}" for each in trial.medians * 2 or [0.0, 0.0]]
        if seconds is None:
            measured = trial.failure
        else:
            measured = f"{1000 * seconds:,.1f} ms ({low} to {high})"
        mark = (
            f"  <- fastest{', within noise: try again, or take either of the two' * is_noise}"
            * (number == best)
        )
        yield f"          {trial.name}: estimate {estimate}, measured {measured}{mark}"
