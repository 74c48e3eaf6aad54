"""BERT's two tasks at once: hidden tokens, and whether the second segment follows the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.models.split import VocabularyPart
from framework.tasks.causal_lm import perplexity_of, token_loss, token_sums
from framework.tasks.classification import class_loss
from framework.tasks.task import Positions, Ratio, Task, rows_with_target

_NUM_INPUTS = 3
_FIELDS = "(input_ids, token_type_ids, attention_mask, mlm_labels, nsp_label)"


class MaskedLM(Task):
    """Masked language model plus next-sentence prediction (Devlin et al. 2018); the loss is the sum
    of both means.

    A batch is (input_ids, token_type_ids, attention_mask, mlm_labels, nsp_label). The first three,
    (batch, length) int64, are the model's inputs, the last two the targets. mlm_labels (batch,
    length) are -100 where nothing is predicted; nsp_label (batch,) is 0 where the second segment
    follows the first, 1 where it is from elsewhere.

    The model returns (mlm_logits (batch, length, vocabulary), nsp_logits (batch, 2)) of any
    floating dtype.
    """

    ignore_index = -100
    vocabulary: VocabularyPart | None = None
    """This rank's part of the tokens' logits, where a tensor group shares them."""

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Divide a batch into (input_ids, token_type_ids, attention_mask) and (mlm_labels,
        nsp_label).

        Raises:
            ConfigError: kind ``task-batch``: the data yields anything else.
        """
        is_row = isinstance(batch, (tuple, list))
        if not is_row or len(batch) != _NUM_INPUTS + 2:
            size = f" of {len(batch)}" if is_row else ""
            reason = (
                f"the data yields a {type(batch).__name__}{size} per batch, and masked_lm "
                f"reads {_FIELDS}"
            )
            fix = "set data: {kind: text_pairs}, or yield these five"
            raise ConfigError.of("task-batch", reason, fix, "task", "masked_lm")
        return tuple(batch[:_NUM_INPUTS]), tuple(batch[_NUM_INPUTS:])

    def share(
        self, inputs: Any, targets: Any, positions: Positions
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Take this rank's part of ids, types and labels.

        The mask stays whole, for attention. The label of the pair counts on rank 0, which has the
        first position, [CLS].
        """
        ids, types, mask = inputs
        labels, nsp_label = targets
        shared_inputs = (
            positions.of(ids, fill=0),
            positions.of(types, fill=0),
            positions.whole(mask, fill=0),
        )
        if positions.rank != 0:
            nsp_label = torch.full_like(nsp_label, self.ignore_index)
        return shared_inputs, (positions.of(labels, fill=self.ignore_index), nsp_label)

    def loss(
        self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]
    ) -> tuple[Ratio, Ratio]:
        """Compute the cross-entropy in nats per predicted token, and per pair."""
        mlm_logits, nsp_logits = outputs
        mlm_labels, nsp_label = targets
        mlm_loss = token_loss(
            mlm_logits, mlm_labels, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )
        return mlm_loss, class_loss(nsp_logits, nsp_label, ignore_index=self.ignore_index)

    def count(self, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Count the predicted tokens, and the pairs."""
        return tuple((labels != self.ignore_index).sum() for labels in targets)

    def measure(
        self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]
    ) -> dict[str, Ratio]:
        """Measure ``mlm_loss`` and ``accuracy`` per predicted token, ``nsp_loss`` and
        ``nsp_accuracy`` per pair.
        """
        mlm_logits, nsp_logits = outputs
        mlm_labels, nsp_label = targets
        nats, correct, num_predicted = token_sums(
            mlm_logits, mlm_labels, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )
        nsp_nats, nsp_correct, num_pairs = token_sums(
            nsp_logits, nsp_label, ignore_index=self.ignore_index
        )
        # The loss, a sum of two quotients, is no ratio of sums: `derive` adds up the quotients over
        # all batches.
        return {
            "mlm_loss": Ratio(nats, num_predicted),
            "accuracy": Ratio(correct, num_predicted),
            "nsp_loss": Ratio(nsp_nats, num_pairs),
            "nsp_accuracy": Ratio(nsp_correct, num_pairs),
        }

    def predicted(
        self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return logits (tokens, vocabulary) and labels (tokens,) of the hidden tokens."""
        return rows_with_target(outputs[0], targets[0], self.ignore_index)

    def derive(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Derive ``loss``, mlm_loss + nsp_loss over all batches, and ``perplexity``,
        exp(mlm_loss).
        """
        if not {"mlm_loss", "nsp_loss"} <= metrics.keys():
            return {}
        loss = metrics["mlm_loss"] + metrics["nsp_loss"]
        return {"loss": loss} | perplexity_of(metrics, loss="mlm_loss")
