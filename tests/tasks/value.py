from __future__ import annotations

from typing import Any

from torch import Tensor

from framework.tasks.task import Ratio


def value_of(loss: Tensor | Ratio | tuple[Ratio, ...]) -> Tensor:
    """What `Task.loss` returned, as the mean over one batch."""
    if isinstance(loss, tuple):
        return sum((ratio.value for ratio in loss[1:]), loss[0].value)
    return loss.value if isinstance(loss, Ratio) else loss


def value_of_step(losses: list[Any]) -> Tensor:
    """What `Task.loss` returned of all micro-batches of a step, as one loss."""
    if isinstance(losses[0], Tensor):
        return sum(losses[1:], losses[0]) / len(losses)
    parts = zip(*(loss if isinstance(loss, tuple) else (loss,) for loss in losses), strict=True)
    return sum(
        sum(ratio.total for ratio in part) / (sum(float(ratio.count) for ratio in part) or 1.0)
        for part in parts
    )
