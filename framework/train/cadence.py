"""When something is due: every so many steps, and at the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Every:
    """Steps at which something happens.

    Attributes:
        every_steps: 0 for never in between.
        at_end: also after the last step.
    """

    every_steps: int = 0
    at_end: bool = False

    @staticmethod
    def of(*, every_steps: int | None, every_epochs: int | None, at_end: bool, steps_per_epoch: int) -> Every:
        """From a config section; steps win over epochs."""
        steps = every_steps or (every_epochs or 0) * steps_per_epoch
        return Every(every_steps=steps, at_end=at_end)

    def is_due(self, step: int, *, total_steps: int) -> bool:
        """Whether it happens after this step (counted from 1)."""
        return bool(self.every_steps and step % self.every_steps == 0) or (self.at_end and step == total_steps)
