"""Steps that DeepSpeed skips because their gradients are not finite: some are a part of fp16, all of them train
nothing.

The loss may stay finite meanwhile (the gradient of a norm at zero is no number), so that nothing else would tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from framework.errors import TrainingError
from framework.system.warn import warn

# In a row, and so many logged points as well: a few bad batches are no reason to end a run.
_ALLOWED_STEPS: Final = 20
_ALLOWED_POINTS: Final = 4
_UNTOLD_STEPS: Final = 4


class SkippedSteps:
    """Counts from one logged point to the next, from numbers that are read there anyway."""

    def __init__(self, start_step: int) -> None:
        self._step = start_step
        self._skipped: float | None = (
            None if start_step else 0.0
        )  # what a checkpoint has brought is told at the first point
        self._scale: float | None = None
        self._steps_in_row = self._points_in_row = 0
        self._is_reported = False

    def note(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> None:
        """Look at a logged point. On all ranks alike.

        Raises:
            TrainingError: kind ``every-step-skipped``: not one of many steps was taken, or none of the whole run.
        """
        skipped, scale = metrics.get("train/skipped_steps", 0.0), metrics.get("train/loss_scale")
        steps = step - self._step
        # In fp16 the scale falls until gradients fit: those steps are skipped for a while, and rightly.
        may_be_falling = scale is not None and scale != self._scale
        if self._skipped is None or not steps or skipped - self._skipped < steps or may_be_falling:
            self._steps_in_row = self._points_in_row = 0
        else:
            self._steps_in_row, self._points_in_row = self._steps_in_row + steps, self._points_in_row + 1
        self._step, self._skipped, self._scale = step, skipped, scale
        if not self._points_in_row:
            return
        of_all = is_last and self._steps_in_row == step
        if of_all or (self._points_in_row > _ALLOWED_POINTS and self._steps_in_row >= _ALLOWED_STEPS):
            raise TrainingError(f"{self._what(step)}, and nothing is trained; {_ADVICE} [every-step-skipped]")
        if self._steps_in_row > _UNTOLD_STEPS and not self._is_reported:
            self._is_reported = True
            warn(f"{self._what(step)}; {_ADVICE} [every-step-skipped]", is_of_all_ranks=True)

    def _what(self, step: int) -> str:
        return (
            f"step {step}: each of the last {self._steps_in_row} steps was skipped, "
            "because its gradients were not finite"
        )


_ADVICE: Final = "look for a root, a norm or a division at zero in the model or the loss, or lower optimizer.lr"
