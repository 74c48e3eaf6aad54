"""Policy for bad steps (`training.bad_steps`): what the run does after each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from framework.engine_protocol import BadStep, BadStepWatch, StepResult
from framework.errors import TrainingError
from framework.train.bad_steps import LeftOut, RolledBack

_ADVICE: Final = (
    "look at the data of this step, lower optimizer.lr, or set training.bad_steps: "
    "skip or roll_back"
)


@dataclass(frozen=True)
class BadStepPolicy:
    """Policy for bad steps (`training.bad_steps`), on all ranks alike.

    Attributes:
        policy: ``stop``, ``skip`` or ``roll_back``.
        max_roll_backs: how often a run may go back.
        watch: finds the bad steps.
        left_out: the windows with data that is left out.
        pass_over: reads the micro-batches of a step that is left out, without training on them.
    """

    policy: str
    max_roll_backs: int
    watch: BadStepWatch
    left_out: LeftOut
    pass_over: Callable[[Iterator[Any]], StepResult]

    def follow(self, found: Sequence[BadStep], *, note: Callable[[str], object]) -> None:
        """Apply the policy to the bad steps that were `found`, in order; `note` logs those that do
        not end the loop.

        Raises:
            TrainingError: kind ``bad-step``: the run ends.
            RolledBack: the run goes back.
        """
        for bad in found:
            if bad.is_taken:
                note(f"{bad}; the second result is taken [bad-step]")
            elif self.policy == "skip":
                note(f"{bad}; skipped: weights and optimizer are as they were [bad-step]")
            elif self.policy == "stop":
                raise TrainingError(f"{bad}; {_ADVICE} [bad-step]")
            elif len(self.left_out.windows) >= self.max_roll_backs:
                reason = (
                    f"training.bad_steps.max_roll_backs = {self.max_roll_backs}, and so "
                    "often it has gone back"
                )
                raise TrainingError(
                    f"{bad}; {reason}: look at the data, or lower optimizer.lr [bad-step]"
                )
            else:
                raise RolledBack(bad)
