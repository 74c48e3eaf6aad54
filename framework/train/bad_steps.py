"""Policy for bad steps (`training.bad_steps`), and the steps that are left out after a roll
back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from framework.engine_protocol import BadStep, BadStepWatch, StepResult
from framework.errors import TrainingError
from framework.system.files import open_own

_KEY: Final = "left_out"
_ADVICE: Final = (
    "look at the data of this step, lower optimizer.lr, or set training.bad_steps: "
    "skip or roll_back"
)


class RolledBack(Exception):  # noqa: N818 - no error
    """Ends a loop that is to begin again at an earlier checkpoint."""

    def __init__(self, bad: BadStep) -> None:
        super().__init__(str(bad))
        self.bad = bad


class LeftOut:
    """Windows (first step, last step) with data that is left out, one for each roll back of the
    run.
    """

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.windows)

    def add(self, windows: Iterable[Sequence[int]]) -> None:
        """Add windows; one that is there already stays once."""
        added = {(int(first), int(last)) for first, last in windows}
        self.windows = sorted(added.union(self.windows))

    def state(self) -> dict[str, Any]:
        """Return the windows for a checkpoint; empty if there are none."""
        if self.windows:
            return {_KEY: [list(window) for window in self.windows]}
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add the windows of a checkpoint."""
        self.add(state.get(_KEY) or ())


def noted_windows(path: Path) -> list[tuple[int, int]]:
    """Read the windows (first step, last step) in a run's events; empty if they cannot be read. A
    checkpoint from before a roll back does not have the window of that roll back.
    """
    windows: list[tuple[int, int]] = []
    with suppress(OSError), open_own(path, "r") as stream:
        for line in stream:
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                if event["kind"] == "roll_back":
                    windows.append((int(event["first"]), int(event["last"])))
    return windows


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
