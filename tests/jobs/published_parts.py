"""Tasks of transformers' own models, on the data of ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from framework.tasks.causal_lm import CausalLM
from framework.tasks.masked_lm import MaskedLM


class LogitsLM(CausalLM):
    """Next tokens."""

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        logits: Tensor = super().forward(model, inputs).logits
        return logits


class PairLM(MaskedLM):
    """Hidden tokens and whether sentences follow each other."""

    def forward(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        ids, types, mask = inputs
        found = model(input_ids=ids, token_type_ids=types, attention_mask=mask)
        return found.prediction_logits, found.seq_relationship_logits
