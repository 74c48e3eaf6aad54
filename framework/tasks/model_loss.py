"""The loss that the model computes by itself, as transformers' models do where their inputs have
labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.system.log import warn
from framework.tasks.loss_checks import is_summed_by_torch, refusal
from framework.tasks.task import Ratio, Task

_LOOKED_AT: Final = 16
"""Batches whose labels are looked at for padding."""
_PADDED: Final = 4
"""Of them, so many have to end like padding."""


class ModelLoss(Task):
    """Batches are mappings, which the model takes whole as keyword arguments; it returns its loss
    as `loss`, as the key ``loss``, or first in a tuple.
    """

    def __init__(
        self,
        *,
        labels: str = "labels",
        mean_over: Literal["samples", "labels", "next_labels"],
        ignore_index: int = -100,
    ) -> None:
        """Set the key of the labels, and what the model's loss is a mean over: samples, labels that
        are not `ignore_index`, or those of them that are not first in their row.
        """
        self.labels = labels
        self.mean_over = mean_over
        self.ignore_index = ignore_index
        self._num_looked_at = self._num_padded = 0

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The whole batch, and its labels, which are counted.

        Raises:
            ConfigError: kind ``task-batch``: it is no mapping, or has no labels.
        """
        if isinstance(batch, Mapping) and isinstance(batch.get(self.labels), Tensor):
            return batch, batch[self.labels]
        if isinstance(batch, Mapping):
            found = f"with {', '.join(map(str, batch))}"
        else:
            found = f"a {type(batch).__name__}"
        reason = f"a batch is a mapping with {self.labels}, and the data yields one that is {found}"
        raise ConfigError.of(
            "task-batch", reason, "name the key of the labels", "task.labels", self.labels
        )

    def loss(self, outputs: Any, targets: Tensor) -> Ratio:
        """What the model computed, as a sum over what it is a mean of."""
        if isinstance(outputs, Mapping):
            found = outputs.get("loss")
        else:
            found = getattr(
                outputs, "loss", outputs[0] if isinstance(outputs, tuple) and outputs else None
            )
        if not isinstance(found, Tensor) or found.numel() != 1:
            reason = f"the model returned no loss, but {type(outputs).__name__}"
            raise ConfigError.of(
                "task-loss-result", reason, "return it as `loss`", "task.kind", "model_loss"
            )
        if is_summed_by_torch(found):
            raise refusal("task.kind", "model_loss")
        count = self.count(targets)
        # A mean over nothing is NaN, and adds nothing to the sum.
        total = found.float().reshape(()) * count
        return Ratio(
            torch.where(
                torch.as_tensor(count, device=total.device) > 0, total, torch.zeros_like(total)
            ),
            count,
        )

    def count(self, targets: Tensor) -> Tensor | int:
        """Number of samples or labels in a batch."""
        if self.mean_over == "samples":
            return len(targets)
        return (
            (targets if self.mean_over == "labels" else targets[:, 1:]) != self.ignore_index
        ).sum()

    def look_at(self, batch: Any) -> None:
        """Warn, once, where rows of the first batches end like padding and no label is left out.
        Reads what the host has, and nothing on a device.
        """
        if (
            self.mean_over == "samples"
            or self._num_looked_at >= _LOOKED_AT
            or not isinstance(batch, Mapping)
        ):
            return
        labels = batch.get(self.labels)
        if (
            not isinstance(labels, Tensor)
            or labels.device.type != "cpu"
            or labels.ndim < 2
            or labels.numel() < 4
        ):
            return
        self._num_looked_at += 1
        if (labels == self.ignore_index).any():
            self._num_looked_at = _LOOKED_AT
            return
        padding = _padding_of(labels)
        self._num_padded += padding is not None
        if (
            padding is not None
            and self._num_looked_at == _LOOKED_AT
            and self._num_padded >= _PADDED
        ):
            warn(
                f"task.ignore_index: no label of the first {_LOOKED_AT} batches is "
                f"{self.ignore_index}, and rows end with one label ({padding}) again and again; "
                f"if the model's loss leaves it out, set task.ignore_index: {padding} "
                "[no-label-ignored]",
                is_of_all_ranks=True,
            )


def _padding_of(labels: Tensor) -> int | None:
    """Return the label that at least half of the rows begin or end with twice; None without one."""
    for ends in (labels[:, -2:], labels[:, :2]):
        ends = ends.flatten(1)
        label = int(ends[:, -1].mode().values)
        if 2 * int((ends == label).all(1).sum()) >= len(labels) > 1:
            return label
    return None
