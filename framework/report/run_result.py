"""`RunResult`: what a training run came to, for its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from framework.train.best import Best
from framework.train.trainer import Outcome

if TYPE_CHECKING:
    from framework.report.history import History


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        folder: the run folder.
        step: optimizer steps taken in all.
        metrics: the last value of every metric.
        samples_per_sec: mean training throughput without the first logged interval.
        start_step: the step that this process started from.
        tokens_per_sec: throughput in tokens; 0 if the data has none.
        best: the best value of the metric that `checkpoint.keep_best` names, from the first step
            on, also of the processes that this one went on from; None if it names none, or none
            was measured.
        ended_early: why a callback ended it before its last step; empty if none did.
    """

    folder: Path
    step: int
    metrics: Mapping[str, float]
    samples_per_sec: float
    start_step: int = 0
    tokens_per_sec: float = 0.0
    best: Best | None = None
    ended_early: str = ""

    @cached_property
    def history(self) -> Mapping[str, History]:
        """Every logged value of each metric, of training and of evaluations, with its step; also of
        earlier processes that this one went on from. Read from the run folder at first use.
        """
        from framework.report.history import read_history  # few ask for it

        return read_history(self.folder)

    @classmethod
    def of(cls, outcome: Outcome, *, folder: Path, start_step: int, best: Best | None) -> RunResult:
        """Build the result from the end of the training loop."""
        reached = {name: value for name, value in vars(outcome).items() if name != "stopped"}
        return cls(folder=folder, start_step=start_step, best=best, **reached)
