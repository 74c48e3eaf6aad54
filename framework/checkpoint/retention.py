"""Retention of a run's checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from framework.checkpoint.manifest import SavedCheckpoint


@dataclass(frozen=True)
class Retention:
    """Rules for checkpoints that are never deleted.

    Attributes:
        last: the newest so many.
        every_steps: those whose step is a multiple of it; None for no such rule.
        best: name of a metric; the one checkpoint that has its best value. While none has a value, any may turn out to
            be what was meant, and none is deleted. None for no such rule.
        best_is: whether the largest or the smallest value is the best.
    """

    last: int
    every_steps: int | None = None
    best: str | None = None
    best_is: Literal["max", "min"] = "max"

    def superfluous(self, checkpoints: Sequence[SavedCheckpoint], *, newest: int) -> list[SavedCheckpoint]:
        """List the checkpoints up to the newest step that may be deleted; later ones belong to another past of the run.

        Args:
            checkpoints: oldest first.
            newest: step of the checkpoint just written.
        """
        own = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest]
        kept = {checkpoint.step for checkpoint in own[-self.last :]}
        if self.every_steps is not None:
            kept |= {checkpoint.step for checkpoint in own if checkpoint.step % self.every_steps == 0}
        best = self.best_of(own)
        if self.best is not None and best is None:
            return []
        if best is not None:
            kept.add(best.step)
        return [checkpoint for checkpoint in own if checkpoint.step not in kept]

    def best_of(self, checkpoints: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """The checkpoint with the best value, the newest of equals; None where none has one."""
        measured = [(self._value(checkpoint), checkpoint.step, checkpoint) for checkpoint in checkpoints]
        known = [(value, step, checkpoint) for value, step, checkpoint in measured if value is not None]
        sign = 1 if self.best_is == "max" else -1
        return max(known, key=lambda entry: (sign * entry[0], entry[1]))[2] if known else None

    def describe_absence(self, checkpoints: Sequence[SavedCheckpoint], *, newest: int) -> str:
        """Describe, at the first save of a run, a metric that was not measured at its step; else empty."""
        own = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest]
        if self.best is None or len(own) != 1 or self.best_of(own) is not None:
            return ""
        known = ", ".join(sorted(own[0].manifest.get("metrics") or {})) or "nothing"
        return (
            f"checkpoint.keep_best = {self.best}: it was not measured at step {own[0].step}, where {known} was; until "
            "a checkpoint has it none is deleted: evaluate at the steps that are saved, or name another metric "
            "[metric-not-measured]"
        )

    def _value(self, checkpoint: SavedCheckpoint) -> float | None:
        """None where it was not measured at that step, or is not a number: NaN is larger than nothing and best of
        nobody.
        """
        value = (checkpoint.manifest.get("metrics") or {}).get(self.best) if self.best is not None else None
        return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None
