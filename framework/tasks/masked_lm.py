"""BERT's two tasks at once: hidden tokens, and whether the second segment follows the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.models.split import VocabularyPart
from framework.tasks.causal_lm import class_loss, perplexity_of, token_loss, token_sums
from framework.tasks.task import Positions, Ratio, Task

_NUM_INPUTS = 3
_FIELDS = "(input_ids, token_type_ids, attention_mask, mlm_labels, nsp_label)"


class MaskedLM(Task):
    """Masked language model plus next-sentence prediction (Devlin et al. 2018); the loss is the sum
    of both means.

    A batch is (input_ids, token_type_ids, attention_mask, mlm_labels, nsp_label): the first three
    (batch, length) int64 are the model's, the last two the targets. mlm_labels (batch, length) are
    -100 where nothing is predicted; nsp_label (batch,) is 0 where the second segment follows the
    first, 1 where it is from elsewhere.

    The model returns (mlm_logits (batch, length, vocabulary), nsp_logits (batch, 2)) of any
    floating dtype.
    """

    ignore_index = -100
    vocabulary: VocabularyPart | None = None
    """This rank's part of the tokens' logits, where a tensor group shares them."""

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """((input_ids, token_type_ids, attention_mask), (mlm_labels, nsp_label)).

        Raises:
            ConfigError: kind ``task-batch``, where the data yields anything else.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) != _NUM_INPUTS + 2:
            if isinstance(batch, (tuple, list)):
                size = f" of {len(batch)}"
            else:
                size = ""
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
        """All but the pair's label have positions. The label counts where the first one, [CLS], is;
        attention reads the whole mask.
        """
        (ids, types, mask), (labels, nsp_label) = inputs, targets
        shared = (
            positions.of(ids, fill=0),
            positions.of(types, fill=0),
            positions.whole(mask, fill=0),
        )
        if positions.rank == 0:
            own_label = nsp_label
        else:
            own_label = torch.full_like(nsp_label, self.ignore_index)
        return shared, (positions.of(labels, fill=self.ignore_index), own_label)

    def loss(
        self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]
    ) -> tuple[Ratio, Ratio]:
        """Cross-entropy in nats per predicted token, and per pair."""
        (mlm_logits, nsp_logits), (mlm_labels, nsp_label) = outputs, targets
        return (
            token_loss(
                mlm_logits, mlm_labels, ignore_index=self.ignore_index, vocabulary=self.vocabulary
            ),
            class_loss(nsp_logits, nsp_label, ignore_index=self.ignore_index),
        )

    def count(self, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Number of predicted tokens, and of pairs."""
        return tuple((labels != self.ignore_index).sum() for labels in targets)

    def measure(
        self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]
    ) -> dict[str, Ratio]:
        """``mlm_loss`` and ``accuracy`` per predicted token, ``nsp_loss`` and ``nsp_accuracy`` per
        pair.
        """
        (mlm_logits, nsp_logits), (mlm_labels, nsp_label) = outputs, targets
        nats, correct, num_predicted = token_sums(
            mlm_logits, mlm_labels, ignore_index=self.ignore_index, vocabulary=self.vocabulary
        )
        nsp_nats, nsp_correct, num_pairs = token_sums(
            nsp_logits, nsp_label, ignore_index=self.ignore_index
        )
        # the loss, a sum of two quotients, is no ratio of sums: `derive` makes it of those over all
        # batches
        return {
            "mlm_loss": Ratio(nats, num_predicted),
            "accuracy": Ratio(correct, num_predicted),
            "nsp_loss": Ratio(nsp_nats, num_pairs),
            "nsp_accuracy": Ratio(nsp_correct, num_pairs),
        }

    def derive(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """``loss``: mlm_loss + nsp_loss, each over all batches; ``perplexity``: exp(mlm_loss)."""
        if not {"mlm_loss", "nsp_loss"} <= metrics.keys():
            return {}
        return {"loss": metrics["mlm_loss"] + metrics["nsp_loss"]} | perplexity_of(
            metrics, loss="mlm_loss"
        )
