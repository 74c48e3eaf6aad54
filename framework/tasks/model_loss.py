"""The loss that the model itself computes, as transformers' models do if their inputs have
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
from framework.tasks.task import Ratio, Task, rows_with_target

_NUM_INSPECTED: Final = 16
"""Number of batches in which labels are searched for padding."""
_FEWEST_PADDED: Final = 4
"""Number of them that must end like padding, for a warning."""


class ModelLoss(Task):
    """Minimises the loss that the model returns.

    A batch is a mapping, which the model takes whole as keyword arguments, or a tuple, which it
    takes whole as positional arguments. The model returns its loss alone, as the attribute or the
    key ``loss``, or in a tuple: the only 0-d tensor in it, or the first item.
    """

    def __init__(
        self,
        *,
        labels: str = "labels",
        mean_over: Literal["samples", "labels", "next_labels"],
        ignore_index: int = -100,
    ) -> None:
        """Describe the model's loss.

        Args:
            labels: key of the labels in a batch; of a tuple the last item is the labels.
            mean_over: the model's loss is a mean over samples, over labels that are not
                `ignore_index`, or over such labels without the first of each row (``next_labels``).
            ignore_index: the label that the loss leaves out.
        """
        self.labels = labels
        self.mean_over = mean_over
        self.ignore_index = ignore_index
        self._num_inspected = 0
        self._num_padded = 0

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the whole batch, and its labels, which are counted.

        Raises:
            ConfigError: kind ``task-batch``: the batch is no mapping, or has no labels.
        """
        labels = self._labels_in(batch)
        if labels is not None and isinstance(batch, Mapping):
            return batch, labels
        if labels is not None:
            return tuple(batch), labels
        if isinstance(batch, Mapping):
            description = f"with {', '.join(map(str, batch))}"
        else:
            description = f"a {type(batch).__name__}"
        reason = (
            f"a batch is a mapping with {self.labels}, or a tuple that ends with the labels, and "
            f"the data yields one that is {description}"
        )
        raise ConfigError.of(
            "task-batch", reason, "name the key of the labels", "task.labels", self.labels
        )

    def _labels_in(self, batch: Any) -> Tensor | None:
        """Return the labels of a batch, or None if it has none."""
        labels: Any = None
        if isinstance(batch, Mapping):
            labels = batch.get(self.labels)
        elif isinstance(batch, list | tuple) and len(batch) > 1:
            labels = batch[-1]
        if isinstance(labels, Tensor):
            return labels
        return None

    def loss(self, outputs: Any, targets: Tensor) -> Ratio:
        """Return the model's loss, a mean, as a sum and its count.

        Raises:
            ConfigError: kind ``task-loss-result``: the model returned no loss, or a sum.
        """
        mean = _loss_in(outputs)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            reason = f"the model returned no loss, but {type(outputs).__name__}"
            fix = "return it alone as a 0-d tensor, or as `loss`"
            raise ConfigError.of("task-loss-result", reason, fix, "task.kind", "model_loss")
        if is_summed_by_torch(mean):
            raise refusal("task.kind", "model_loss")
        count = self.count(targets)
        total = mean.float().reshape(()) * count
        # The mean of no labels is NaN, and must add nothing to the sum.
        has_labels = torch.as_tensor(count, device=total.device) > 0
        return Ratio(torch.where(has_labels, total, torch.zeros_like(total)), count)

    def count(self, targets: Tensor) -> Tensor | int:
        """Count the samples or labels of a batch."""
        if self.mean_over == "samples":
            return len(targets)
        if self.mean_over == "next_labels":
            targets = targets[:, 1:]
        return (targets != self.ignore_index).sum()

    def predicted(self, outputs: Any, targets: Tensor) -> tuple[Any, Any]:
        """Return the model's logits and the labels; where the loss is a mean over labels, logits
        (labels, classes) and labels (labels,) without those left out.
        """
        logits, _ = super().predicted(outputs, targets)
        if self.mean_over == "samples":
            return logits, targets
        if self.mean_over == "next_labels":
            logits = logits[:, :-1]
            targets = targets[:, 1:]
        return rows_with_target(logits, targets, self.ignore_index)

    def on_host(self, batch: Any) -> Any:
        """Return the batch; see `look_at`."""
        self.look_at(batch)
        return batch

    def look_at(self, batch: Any) -> None:
        """Warn, once, if rows of the first batches end like padding and no label is left out.

        It reads tensors on the host alone, and none on a device.
        """
        if self.mean_over == "samples" or self._num_inspected >= _NUM_INSPECTED:
            return
        labels = self._labels_in(batch)
        if labels is None or labels.device.type != "cpu":
            return
        if labels.ndim < 2 or labels.numel() < 4:
            return
        self._num_inspected += 1
        if (labels == self.ignore_index).any():
            self._num_inspected = _NUM_INSPECTED
            return
        padding = _padding_of(labels)
        if padding is None:
            return
        self._num_padded += 1
        if self._num_inspected == _NUM_INSPECTED and self._num_padded >= _FEWEST_PADDED:
            warn(
                f"task.ignore_index: no label of the first {_NUM_INSPECTED} batches is "
                f"{self.ignore_index}, and rows end with one label ({padding}) again and again; "
                f"if the model's loss leaves it out, set task.ignore_index: {padding} "
                "[no-label-ignored]",
                is_of_all_ranks=True,
            )


def _loss_in(outputs: Any) -> Any:
    """Return what stands for the loss in a model's outputs, or None."""
    if isinstance(outputs, Tensor) and outputs.ndim == 0:
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if hasattr(outputs, "loss"):
        return outputs.loss
    if isinstance(outputs, tuple) and outputs:
        scalars = [item for item in outputs if isinstance(item, Tensor) and item.ndim == 0]
        if len(scalars) == 1:
            return scalars[0]
        return outputs[0]
    return None


def _padding_of(labels: Tensor) -> int | None:
    """Return the label that stands twice at the end, or at the start, of at least half of the rows;
    None if there is none.
    """
    for ends in (labels[:, -2:], labels[:, :2]):
        ends = ends.flatten(1)
        label = int(ends[:, -1].mode().values)
        if 2 * int((ends == label).all(1).sum()) >= len(labels) > 1:
            return label
    return None
