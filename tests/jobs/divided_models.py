"""Models of a user's own in the size of the counted ones of `tests/plan/test_memory.py`: tensor
groups divide their weights, sequence groups their positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from framework.models.sequence import attend, first_position


class Llama(LlamaForCausalLM):  # type: ignore[misc]
    """Tokens (batch, positions) to logits."""

    def __init__(self) -> None:
        sizes = {"vocab_size": 3001, "hidden_size": 256, "intermediate_size": 700}
        heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        super().__init__(LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids).logits


class GPT2(GPT2LMHeadModel):  # type: ignore[misc]
    """Tokens (batch, positions) to logits."""

    def __init__(self) -> None:
        sizes = {"vocab_size": 2000, "n_positions": 64, "n_embd": 256, "n_layer": 3, "n_head": 4}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        super().__init__(GPT2Config(**sizes, **ends, use_cache=False))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids).logits


class Block(nn.Module):
    """Attention and a perceptron, both with the plan of `WRITTEN_PLAN`."""

    shares_sequences = True

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = width // num_heads
        self.first_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.first_norm(hidden)
        heads = []
        for layer in (self.query, self.key, self.value):
            heads.append(layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2))
        mixed = attend(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.mix(mixed)
        return hidden + self.down(torch.relu(self.up(self.second_norm(hidden))))


WRITTEN_PLAN = {
    "embed": "vocabulary",
    "blocks.*.query": "column",
    "blocks.*.key": "column",
    "blocks.*.value": "column",
    "blocks.*.mix": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocabulary",
}


class Written(nn.Module):
    """A GPT as a user writes one: tokens (batch, positions) to logits."""

    def __init__(self, vocab_size: int = 2000, width: int = 256, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        first = first_position(tokens.shape[1])
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
