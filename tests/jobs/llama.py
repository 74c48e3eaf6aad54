"""A small Llama of transformers whose forward() takes tokens and returns logits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Llama(LlamaForCausalLM):  # type: ignore[misc]
    """Tokens (batch, sequence) to logits (batch, sequence, 256)."""

    def __init__(self) -> None:
        sizes = {
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        }
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        super().__init__(LlamaConfig(**sizes, **heads, tie_word_embeddings=False, use_cache=False))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids).logits
