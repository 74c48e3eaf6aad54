"""A model of transformers, its task and text of uneven lengths, for ranks that share sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import logits_of
from framework.tasks.task import Positions, Ratio, Task


def tiny_llama(**shape: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=261, **sizes | shape))


def window_llama() -> nn.Module:
    """A model in which a position sees the last few ones only, in half of its layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=261, num_key_value_heads=4, **sizes, **window))


def tiny_gpt() -> nn.Module:
    """The GPT here, as a model of one's own."""
    from framework.recipes.language_models.gpt import GPT

    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "mlp_size": 64}
    return GPT.of(vocab_size=261, max_positions=32, dropout=0.0, **sizes)


class RaggedLM(CausalLM):
    """Next tokens of samples that end early, each elsewhere, and of which some targets are left
    out.
    """

    def split(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        ids, targets = batch
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = places < ids.shape[1] - ids[:, :1] % 13
        targets = torch.where(mask & (ids % 3 > 0), targets, self.ignore_index)
        return {"input_ids": ids, "attention_mask": mask.long()}, targets

    def share(
        self, inputs: Any, targets: Tensor, positions: Positions
    ) -> tuple[dict[str, Tensor], Tensor]:
        ids, targets = super().share(inputs["input_ids"], targets, positions)
        return {
            "input_ids": ids,
            "attention_mask": positions.whole(inputs["attention_mask"], fill=0),
        }, targets

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        logits: Tensor = logits_of(super().forward(model, inputs))
        return logits


class StagedRaggedLM(RaggedLM):
    """The same for stages, which call their layers themselves."""

    forward = Task.forward


class PaddedLM(RaggedLM):
    """The same, padded with token 1; at the begin of a sample where `is_left`."""

    def __init__(self, *, is_left: bool = False) -> None:
        self.is_left = is_left

    def split(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = super().split(batch)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self.is_left:
            mask, targets = mask.flip(1), targets.masked_fill(mask.flip(1) == 0, self.ignore_index)
        return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}, targets


def tiny_roberta() -> nn.Module:
    """A model that numbers positions from 2 on, and padding not at all."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(
        RobertaConfig(pad_token_id=1, max_position_embeddings=40, **_TINY, **_NO_DROPOUT)
    )


def tiny_opt() -> nn.Module:
    """A model that numbers what the mask leaves."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return OPTForCausalLM(
        OPTConfig(vocab_size=261, hidden_size=32, max_position_embeddings=40, dropout=0.0, **sizes)
    )


def mixing_bert(kind: str) -> nn.Module:
    """A model of transformers that mixes positions elsewhere than in attention: MobileBERT by three
    words in its embeddings.
    """
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_TINY, embedding_size=32, **_NO_DROPOUT)
    model: nn.Module = getattr(transformers, f"{kind}ForMaskedLM")(config)
    return model


_TINY: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Pooled(nn.Module):
    """A model around one that shares sequences, with what it makes of all positions of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny_llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.body(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits + logits.mean(1, keepdim=True)


class Dropping(CausalLM):
    """A loss that moves its targets by one more, within what a rank sees."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Ratio:
        return super().loss(outputs[:, :-1], targets[:, 1:])


class OwnLoss(CausalLM):
    """A loss that reads logits itself."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Ratio:
        return super().loss(2 * outputs, targets)


def long_text(length: int) -> TensorDataset:
    """One sample of this many tokens, each of which the one before it decides."""
    ids = torch.arange(length + 1).square() % 61
    return TensorDataset(ids[None, :-1], ids[None, 1:])


class NoKnownAttention(nn.Module):
    """A model that mixes positions by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = (
            nn.Embedding(261, 32),
            nn.MultiheadAttention(32, 2, batch_first=True),
        )

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        mixed: Tensor = self.attention(embedded, embedded, embedded)[0]
        return mixed @ self.embed.weight.T
