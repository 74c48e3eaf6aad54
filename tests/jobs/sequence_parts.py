"""A model of transformers, its task and text of uneven lengths, for ranks that share sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework.tasks.causal_lm import CausalLM
from framework.tasks.task import Positions, Ratio


def tiny_llama(**shape: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=261, num_key_value_heads=2, **sizes | shape))


def window_llama() -> nn.Module:
    """A model in which a position sees the last few ones only, in half of its layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=261, num_key_value_heads=4, **sizes, **window))


class RaggedLM(CausalLM):
    """Next tokens of samples that end early, each elsewhere, and of which some targets are left out."""

    def split(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        ids, targets = batch
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = places < ids.shape[1] - ids[:, :1] % 13
        targets = torch.where(mask & (ids % 3 > 0), targets, self.ignore_index)
        return {"input_ids": ids, "attention_mask": mask.long()}, targets

    def share(self, inputs: Any, targets: Tensor, positions: Positions) -> tuple[dict[str, Tensor], Tensor]:
        ids, targets = super().share(inputs["input_ids"], targets, positions)
        return {"input_ids": ids, "attention_mask": positions.whole(inputs["attention_mask"], fill=0)}, targets

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        logits: Tensor = super().forward(model, inputs).logits
        return logits


class OwnLoss(CausalLM):
    """A loss that reads logits itself."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Ratio:
        return super().loss(2 * outputs, targets)


def long_text(length: int) -> TensorDataset:
    """One sample of so many tokens, each of which the one before it decides."""
    ids = torch.arange(length + 1).square() % 61
    return TensorDataset(ids[None, :-1], ids[None, 1:])


class NoKnownAttention(nn.Module):
    """A model that mixes positions by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(261, 32), nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        mixed: Tensor = self.attention(embedded, embedded, embedded)[0]
        return mixed @ self.embed.weight.T
