"""The loss that the model computes by itself, as transformers' models do where their inputs have labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.tasks.task import Ratio, Task

_IGNORED = -100


class ModelLoss(Task):
    """Batches are mappings, which the model takes whole as keyword arguments; it returns its loss as `loss`, as the key
    ``loss``, or first in a tuple.
    """

    def __init__(self, *, labels: str = "labels", mean_over: Literal["samples", "labels", "next_labels"]) -> None:
        """Set the key of the labels, and what the model's loss is a mean over: samples, labels that are not -100, or
        those of them that are not first in their row.
        """
        self.labels, self.mean_over = labels, mean_over

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The whole batch, and its labels, which are counted.

        Raises:
            ConfigError: kind ``task-batch``: it is no mapping, or has no labels.
        """
        if isinstance(batch, Mapping) and isinstance(batch.get(self.labels), Tensor):
            return batch, batch[self.labels]
        found = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        reason = f"a batch is a mapping with {self.labels}, and the data yields one that is {found}"
        raise ConfigError.of("task-batch", reason, "name the key of the labels", "task.labels", self.labels)

    def loss(self, outputs: Any, targets: Tensor) -> Ratio:
        """What the model computed, as a sum over what it is a mean of."""
        if isinstance(outputs, Mapping):
            found = outputs.get("loss")
        else:
            found = getattr(outputs, "loss", outputs[0] if isinstance(outputs, tuple) and outputs else None)
        if not isinstance(found, Tensor) or found.numel() != 1:
            reason = f"the model returned no loss, but {type(outputs).__name__}"
            raise ConfigError.of("task-loss-result", reason, "return it as `loss`", "task.kind", "model_loss")
        count = self.count(targets)
        # A mean over nothing is NaN, and adds nothing to the sum.
        total = found.float().reshape(()) * count
        return Ratio(
            torch.where(torch.as_tensor(count, device=total.device) > 0, total, torch.zeros_like(total)), count
        )

    def count(self, targets: Tensor) -> Tensor | int:
        """Number of samples or labels in a batch."""
        if self.mean_over == "samples":
            return len(targets)
        return ((targets if self.mean_over == "labels" else targets[:, 1:]) != _IGNORED).sum()
