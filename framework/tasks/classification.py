"""One class per sample: cross-entropy and accuracy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from framework.tasks.task import Ratio, Task, rows_with_target


class Classification(Task):
    """Cross-entropy over classes; metrics: loss and accuracy.

    The model returns logits (batch, num_classes) of any floating dtype; targets are class numbers
    (batch,) int64. With further dimensions, as (batch, num_classes, H, W) and (batch, H, W), every
    position counts as a sample. A target of `ignore_index` is left out of loss and metrics.
    """

    def __init__(self, *, label_smoothing: float = 0.0, ignore_index: int = -100) -> None:
        """Set the options of the loss.

        Args:
            label_smoothing: share of the target that is spread evenly over all classes, in [0, 1)
                (Szegedy et al. 2016, section 7). It applies to training only: the measured loss is
                the plain cross-entropy, comparable between runs.
            ignore_index: the target that is left out.
        """
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index

    def loss(self, outputs: Any, targets: Tensor) -> Ratio:
        """Compute the cross-entropy in nats per sample, with label smoothing."""
        outputs = logits_of(outputs)
        return class_loss(
            outputs, targets, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )

    def count(self, targets: Tensor) -> Tensor:
        """Count the samples that are not left out."""
        return (targets != self.ignore_index).sum()

    def measure(self, outputs: Any, targets: Tensor) -> dict[str, Ratio]:
        """Measure ``loss``, the cross-entropy in nats, not smoothed, and ``accuracy``, the share of
        samples with the largest logit at the target.
        """
        logits = logits_of(outputs).movedim(1, -1).flatten(0, -2)
        targets = targets.flatten()
        nats, guesses = guessed(logits, targets, ignore_index=self.ignore_index)
        nats, correct, count = summed(nats, guesses, targets, ignore_index=self.ignore_index)
        return {"loss": Ratio(nats, count), "accuracy": Ratio(correct, count)}

    def predicted(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (samples, classes) and targets (samples,) without those left out."""
        scores = logits_of(outputs).movedim(1, -1)
        return rows_with_target(scores, targets, self.ignore_index)


def logits_of(outputs: Any) -> Any:
    """Return the logits of an output of transformers, or the output itself."""
    return getattr(outputs, "logits", outputs)


def class_loss(
    logits: Tensor, targets: Tensor, *, ignore_index: int, label_smoothing: float = 0.0
) -> Ratio:
    """Compute the cross-entropy in nats over targets that are not `ignore_index`.

    Args:
        logits: (batch, classes, ...), floating.
        targets: (batch, ...) int64.
        ignore_index: the target that is left out.
        label_smoothing: as in `Classification`.

    Returns:
        A float32 sum and its count.
    """
    nats = cross_entropy(
        logits.float(),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return Ratio(nats, (targets != ignore_index).sum())


def guessed(logits: Tensor, targets: Tensor, *, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats of each target, 0 for `ignore_index`, and the class with the
    largest logit: logits (samples, classes), targets (samples,).
    """
    nats = cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")
    return nats, logits.argmax(dim=-1)


def summed(
    nats: Tensor, guesses: Tensor, targets: Tensor, *, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up cross-entropies, right guesses and targets that are not `ignore_index`: 0-d float64,
    on the device of the targets.
    """
    nats = nats.detach().double().sum()
    has_target = targets != ignore_index
    correct = (guesses == targets).logical_and(has_target).double().sum()
    return nats, correct, has_target.double().sum()
