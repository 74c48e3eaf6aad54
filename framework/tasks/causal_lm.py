"""The next token at every position: cross-entropy, accuracy, perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy

from framework.models.split import VocabularyPart
from framework.models.tiled_loss import TiledLoss
from framework.tasks.task import Positions, Ratio, Task

# exp of more than this is no float any more.
_LARGEST_EXPONENT: Final = 709.0


def perplexity_of(metrics: Mapping[str, float], *, loss: str) -> dict[str, float]:
    """``{"perplexity": exp(metrics[loss])}``; infinite where a float ends, nothing where the loss
    was not measured.
    """
    if loss not in metrics:
        return {}
    nats = metrics[loss]
    return {"perplexity": math.inf if nats > _LARGEST_EXPONENT else math.exp(nats)}


class CausalLM(Task):
    """Next-token cross-entropy; metrics: loss, accuracy, perplexity.

    The model returns logits (batch, length, vocabulary) of any floating dtype; targets are token
    numbers (batch, length) int64, already shifted by the data: the target at a position is the
    token that follows it. A target of -100 is left out of loss and metrics.
    """

    ignore_index = -100
    vocabulary: VocabularyPart | None = None
    """This rank's part of the logits, where a tensor group shares them."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        """As of any task; the labels of a mapping are the tokens themselves, as transformers'
        models take them, and move by one.
        """
        inputs, targets = super().split(batch)
        if isinstance(batch, Mapping):
            targets = functional.pad(targets[:, 1:], (0, 1), value=self.ignore_index)
        return inputs, targets

    def share(self, inputs: Tensor, targets: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Both have positions; those that are added at the end are seen by none before them."""
        return positions.of(inputs, fill=0), positions.of(targets, fill=self.ignore_index)

    def loss(self, outputs: Tensor, targets: Tensor) -> Ratio:
        """Cross-entropy in nats per position with a target."""
        return token_loss(
            outputs, targets, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )

    def count(self, targets: Tensor) -> Tensor:
        """Number of positions with a target."""
        return (targets != self.ignore_index).sum()

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Ratio]:
        """``loss``: nats per token; ``accuracy``: share of tokens whose logit is the largest."""
        nats, correct, count = token_sums(
            outputs, targets, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )
        return {"loss": Ratio(nats, count), "accuracy": Ratio(correct, count)}

    def derive(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """``perplexity``: exp(loss), of the loss over all tokens and not of a mean over batches."""
        return perplexity_of(metrics, loss="loss")


def logits_of(outputs: Any) -> Any:
    """What a model returns, or of an output of transformers its logits."""
    return getattr(outputs, "logits", outputs)


def class_loss(
    logits: Tensor, targets: Tensor, *, ignore_index: int, label_smoothing: float = 0.0
) -> Ratio:
    """Compute the cross-entropy in nats over targets that are not `ignore_index`: a float32 sum, a
    count.

    Logits (batch, classes, ...) are floating, targets (batch, ...) int64.
    """
    nats = cross_entropy(
        logits.float(),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return Ratio(nats, (targets != ignore_index).sum())


def token_loss(
    logits: Any, targets: Tensor, *, ignore_index: int, vocabulary: VocabularyPart | None = None
) -> Ratio:
    """`class_loss` of logits (..., vocabulary), or this rank's part of them, or what tiles gave,
    and targets (...,).
    """
    logits = logits_of(logits)
    if isinstance(logits, TiledLoss):
        return Ratio(logits.nats, (targets != ignore_index).sum())
    logits = logits.flatten(0, -2)
    targets = targets.flatten()
    if vocabulary is None:
        return class_loss(logits, targets, ignore_index=ignore_index)
    nats = vocabulary.nats(logits, targets, ignore_index=ignore_index)
    return Ratio(nats.sum(), (targets != ignore_index).sum())


def token_sums(
    logits: Any, targets: Tensor, *, ignore_index: int, vocabulary: VocabularyPart | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the positions whose target (...,) is not `ignore_index`, of logits (...,
    vocabulary), or this rank's part of them.

    Returns:
        Cross-entropy in nats, number of right guesses, number of positions: 0-d float64, on the
        logits' device.
    """
    logits = logits_of(logits)
    targets = targets.flatten()
    is_done = isinstance(logits, TiledLoss)
    if is_done:
        logits = logits
    else:
        logits = logits.flatten(0, -2)
    if is_done:
        nats = logits.nats
        guesses = logits.guesses.flatten()
    elif vocabulary is None:
        nats = cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")
        guesses = logits.argmax(dim=-1)
    else:
        nats = vocabulary.nats(logits, targets, ignore_index=ignore_index)
        guesses = vocabulary.guesses(logits)
    nats = nats.detach().double().sum()
    counts = targets != ignore_index
    correct = (guesses == targets).logical_and(counts).double().sum()
    return nats, correct, counts.double().sum()
