"""``plan CONFIG --trials 4``: the best strategies of the search for some steps each, on the devices at hand.

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

_ROUNDS: Final = 2
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
        seconds: of a step, one for every few steps of each round, without the first few of a round.
        failure: why it does not run; empty where it does.
    """

    name: str
    plan: Plan
    estimate_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def median_seconds(self) -> float | None:
        """Median time of a step; None where it does not run."""
        return median(self.seconds) if self.seconds and not self.failure else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, each named as what it is."""
        return {
            "settings": self.name,
            "estimate_seconds": self.estimate_seconds,
            "measured_seconds": self.median_seconds,
            "measurements": self.seconds,
            "failure": self.failure,
        }


def run_trials(candidates: Sequence[Candidate]) -> list[Trial]:
    """Try strategies in turn; each line of progress goes to stderr.

    Raises:
        UsageError: they are for several hosts.
        TrainingError: none of them runs.
    """
    if any(each.plan.cluster.num_hosts > 1 for each in candidates):
        raise UsageError("--trials runs on this machine alone; give --num_gpus N, the ranks on one host")
    trials = [trial_of(candidate) for candidate in candidates]
    measure_trials(trials, note=lambda line: write(sys.stderr, f"{line}\n"))
    if not any(trial.median_seconds for trial in trials):
        failures = "; ".join(f"{trial.name}: {trial.failure}" for trial in trials) or "the search has found none"
        raise TrainingError(f"--trials: no strategy runs on this machine: {failures} [trials-failed]")
    return trials


def fastest(trials: Sequence[Trial]) -> int:
    """Place of the trial with the shortest median step."""
    return min((each.median_seconds, number) for number, each in enumerate(trials) if each.median_seconds is not None)[
        1
    ]


def trial_of(candidate: Candidate) -> Trial:
    """Make the trial of a strategy."""
    seconds = candidate.time.total if candidate.time else None
    return Trial(settings_text(unusual(candidate.settings)) or "as planned", candidate.plan, seconds)


def measure_trials(trials: Sequence[Trial], *, note: Callable[[str], None], rounds: int = _ROUNDS) -> None:
    """Run all of them in turn, as often as there are rounds; what fails is left out of later rounds."""
    for number in range(rounds):
        for trial in trials:
            if not trial.failure:
                before = len(trial.seconds)
                _run(trial)
                took = trial.failure or f"{1000 * median(trial.seconds[before:] or [0.0]):.1f} ms a step"
                note(f"round {number + 1} of {rounds}: {trial.name}: {took}")


def _run(trial: Trial) -> None:
    """One run; its intervals join those of earlier ones."""
    done, trial.failure = run_alone(trial.plan, steps=_STEPS, log_every=_LOG_EVERY, longest_seconds=_LONGEST_SECONDS)
    if trial.failure == INTERRUPTED:
        raise KeyboardInterrupt
    if not trial.failure:
        trial.seconds += [0.001 * took for took in done.metrics["time/step_ms"].values[1:]]


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """Lines for a person: estimate and measurement of each, the fastest marked."""
    best = fastest(trials)
    yield f"{'trials':<10}step of each: median of {_ROUNDS} rounds of {_STEPS} steps, the first {_LOG_EVERY} left out"
    for number, trial in enumerate(trials):
        estimate = "not known" if trial.estimate_seconds is None else f"{1000 * trial.estimate_seconds:,.1f} ms"
        seconds = trial.median_seconds
        measured = trial.failure if seconds is None else f"{1000 * seconds:,.1f} ms"
        mark = "  <- fastest" if number == best else ""
        yield f"          {trial.name}: estimate {estimate}, measured {measured}{mark}"
