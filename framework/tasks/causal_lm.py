"""The next token at every position: cross-entropy, accuracy, perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

from framework.models.split import VocabularyPart
from framework.models.tiled_loss import TiledLoss
from framework.tasks.classification import class_loss, guessed, logits_of, summed
from framework.tasks.task import Positions, Ratio, Task, rows_with_target

# exp of a larger number overflows a float.
_LARGEST_EXPONENT: Final = 709.0
_DIMENSIONS_OF_TOKENS: Final = 2  # rows and positions
_OF_WHOLE_ROWS: Final = ("position_ids", "attention_mask")  # inputs that ranks do not divide


def perplexity_of(metrics: Mapping[str, float], *, loss: str) -> dict[str, float]:
    """Return ``{"perplexity": exp(metrics[loss])}``; empty if the loss was not measured.

    The perplexity is infinite where it would overflow.
    """
    if loss not in metrics:
        return {}
    nats = metrics[loss]
    if nats > _LARGEST_EXPONENT:
        return {"perplexity": math.inf}
    return {"perplexity": math.exp(nats)}


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
        """Divide a batch as any task does, and shift the labels of a mapping by one.

        They are the tokens themselves, as transformers' models take them.
        """
        inputs, targets = super().split(batch)
        if isinstance(batch, Mapping):
            targets = functional.pad(targets[:, 1:], (0, 1), value=self.ignore_index)
        return inputs, targets

    def on_host(self, batch: Any) -> Any:
        """Find where the texts of packed rows begin, before their places leave the host."""
        inputs = batch
        if isinstance(batch, list | tuple) and batch:
            inputs = batch[0]
        if isinstance(inputs, Mapping) and isinstance(inputs.get("position_ids"), Tensor):
            from framework.models.packed_attention import note_texts

            note_texts(inputs["position_ids"])
        return batch

    def share(self, inputs: Any, targets: Tensor, positions: Positions) -> tuple[Any, Tensor]:
        """Take this rank's part of inputs and targets. The places of packed rows and the mask stay
        whole, for attention.

        Positions that are added at the end are seen by no position before them.
        """
        shared_inputs: Any
        if isinstance(inputs, Mapping):
            shared_inputs = {}
            for name, value in inputs.items():
                if not isinstance(value, Tensor) or value.ndim < _DIMENSIONS_OF_TOKENS:
                    shared_inputs[name] = value
                elif name in _OF_WHOLE_ROWS:
                    shared_inputs[name] = positions.whole(value, fill=0)
                else:
                    shared_inputs[name] = positions.of(value, fill=0)
        else:
            shared_inputs = positions.of(inputs, fill=0)
        return shared_inputs, positions.of(targets, fill=self.ignore_index)

    def loss(self, outputs: Tensor, targets: Tensor) -> Ratio:
        """Compute the cross-entropy in nats per position with a target."""
        return token_loss(
            outputs, targets, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )

    def count(self, targets: Tensor) -> Tensor:
        """Count the positions with a target."""
        return (targets != self.ignore_index).sum()

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Ratio]:
        """Measure ``loss``, nats per token, and ``accuracy``, the share of tokens with the largest
        logit.
        """
        nats, correct, count = token_sums(
            outputs, targets, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )
        return {"loss": Ratio(nats, count), "accuracy": Ratio(correct, count)}

    def predicted(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (tokens, vocabulary) and targets (tokens,) without those left out."""
        return rows_with_target(logits_of(outputs), targets, self.ignore_index)

    def derive(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Derive ``perplexity``, exp(loss), from the loss over all tokens, not a mean over
        batches.
        """
        return perplexity_of(metrics, loss="loss")


def token_loss(
    logits: Any, targets: Tensor, *, ignore_index: int, vocabulary: VocabularyPart | None = None
) -> Ratio:
    """Sum the cross-entropy in nats over the targets that are not `ignore_index`, and count these
    targets.

    Args:
        logits: (..., vocabulary); this rank's part of the last axis, where `vocabulary` is given;
            or a `TiledLoss`, which holds the sum already.
        targets: (...,) int64.
        ignore_index: the target that is left out.
        vocabulary: this rank's part, where the vocabulary is divided.
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
    """Sum up the metrics of all positions with a target that is not `ignore_index`.

    The arguments are as for `token_loss`.

    Returns:
        Cross-entropy in nats, number of right guesses, number of positions: 0-d float64, on the
        logits' device.
    """
    logits = logits_of(logits)
    targets = targets.flatten()
    if isinstance(logits, TiledLoss):
        assert logits.guesses is not None
        nats = logits.nats
        guesses = logits.guesses.flatten()
    else:
        logits = logits.flatten(0, -2)
        if vocabulary is None:
            nats, guesses = guessed(logits, targets, ignore_index=ignore_index)
        else:
            nats = vocabulary.nats(logits, targets, ignore_index=ignore_index)
            guesses = vocabulary.guesses(logits)
    return summed(nats, guesses, targets, ignore_index=ignore_index)
