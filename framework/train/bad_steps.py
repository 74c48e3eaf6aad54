"""What becomes of bad steps (`training.bad_steps`), and the steps whose data is left out after a roll back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from framework.config.training import BadSteps
from framework.engine.protocol import StepResult
from framework.errors import TrainingError
from framework.system.files import open_own

_KEY: Final = "left_out"
_ADVICE: Final = "look at the data of this step, lower optimizer.lr, or set training.bad_steps: skip or roll_back"


@dataclass(frozen=True)
class BadStep:
    """A step whose numbers went wrong, with the limits that they were held against.

    Attributes:
        ranks: those whose own loss is not finite, or differed when it was computed again.
        verdict: of a step that was computed again, ``transient`` or ``persistent``.
        is_taken: whether it was good then, and its update was made.
    """

    step: int
    loss: float
    grad_norm: float
    loss_limit: float
    norm_limit: float
    _: KW_ONLY
    ranks: tuple[str, ...] = ()
    verdict: str = ""
    is_taken: bool = False

    def __str__(self) -> str:
        pairs = ("train/loss", self.loss, self.loss_limit), ("train/grad_norm", self.grad_norm, self.norm_limit)
        wrong = [
            f"{name} = {value:.6g}{f', above {limit:.4g}' if math.isfinite(value) else ''}"
            for name, value, limit in pairs
            if not value <= limit or not math.isfinite(value)
        ]
        where = f" ({', '.join(self.ranks)})" if self.ranks else ""
        return f"step {self.step}: {' and '.join(wrong)}{where}{self._described_rerun()}"

    def _described_rerun(self) -> str:
        if self.verdict == "persistent":
            return "; computed again it is the same: persistent, of the data or the model"
        place = "the ranks named" if self.ranks else "which rank, its loss does not show"
        return f"; computed again it is another: transient, suspect the hardware ({place})" if self.verdict else ""

    def details(self) -> dict[str, Any]:
        """Return what an event holds; JSON knows no NaN."""
        values = {name: getattr(self, name) for name in ("loss", "grad_norm", "loss_limit", "norm_limit")}
        found = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        further = {"ranks": list(self.ranks), "verdict": self.verdict, "is_taken": self.is_taken}
        return found | {name: value for name, value in further.items() if value}


class RolledBack(Exception):  # noqa: N818 - no error
    """Ends a loop that is to begin again at an earlier checkpoint."""

    def __init__(self, bad: BadStep) -> None:
        super().__init__(str(bad))
        self.bad = bad


class LeftOut:
    """Pairs of first and last step whose data is left out, one for each roll back of the run."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.windows)

    def add(self, windows: Iterable[Sequence[int]]) -> None:
        """Add windows that are not known."""
        self.windows = sorted({*self.windows, *((int(first), int(last)) for first, last in windows)})

    def state(self) -> dict[str, Any]:
        """Return them for a checkpoint; empty where there are none."""
        return {_KEY: [list(window) for window in self.windows]} if self.windows else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add those of a checkpoint."""
        self.add(state.get(_KEY) or ())


def noted_windows(path: Path) -> list[tuple[int, int]]:
    """Read the windows in a run's events: a checkpoint from before a roll back knows nothing of it."""
    found = []
    with suppress(OSError), open_own(path, "r") as stream:
        for line in stream:
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                if event["kind"] == "roll_back":
                    found.append((int(event["first"]), int(event["last"])))
    return found


class Watch(Protocol):
    """The engine's look at its steps."""

    @property
    def has_news(self) -> bool:
        """Check whether the host knows of a bad step that was not read."""
        ...

    def read(self) -> list[BadStep]:
        """List the bad steps since the last reading. Collective."""
        ...


@dataclass(frozen=True)
class BadStepPolicy:
    """What becomes of bad steps, alike on all ranks; `pass_over` takes a step that is left out."""

    asked: BadSteps
    watch: Watch
    left_out: LeftOut
    pass_over: Callable[[Iterator[Any]], StepResult]

    def follow(self, found: Sequence[BadStep], *, note: Callable[[str], object]) -> None:
        """Do what is asked for about bad steps, and `note` what stops nothing.

        Raises:
            TrainingError: kind ``bad-step``: the run ends.
            RolledBack: it goes back.
        """
        for bad in found:
            if bad.is_taken:
                note(f"{bad}; the second result is taken [bad-step]")
            elif self.asked.policy == "skip":
                note(f"{bad}; skipped: weights and optimizer are as they were [bad-step]")
            elif self.asked.policy == "stop":
                raise TrainingError(f"{bad}; {_ADVICE} [bad-step]")
            elif (count := len(self.left_out.windows)) >= self.asked.max_roll_backs:
                reason = f"the run has gone back {count} times (training.bad_steps.max_roll_backs)"
                raise TrainingError(f"{bad}; {reason}: look at the data, or lower optimizer.lr [bad-step]")
            else:
                raise RolledBack(bad)
