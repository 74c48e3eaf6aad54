"""Small models of many families, with random weights and without downloads, and samples that each
can learn from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, CLASSES, LENGTH = 67, 5, 12
# What the configurations of transformers call sizes.
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {"intermediate_size": 48}
_GROUPED = _TEXT | _WIDE | {"num_key_value_heads": 2}
_OFF = {"attention_dropout": 0.0, "dropout": 0.0}
_SEQ2SEQ = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPEECH = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_mel_bins": 8,
    "max_source_positions": LENGTH,
}
_SPEECH |= {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("attention_heads", 4),)
}
_SPEECH |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_target_positions": LENGTH}
# Family -> class of transformers, and its configuration.
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", _GROUPED | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "mixtral": ("MixtralForCausalLM", _GROUPED | {"num_local_experts": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", _TEXT | _WIDE),
    "opt": ("OPTForCausalLM", _TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32} | _OFF),
    "roberta": (
        "RobertaForSequenceClassification",
        _TEXT
        | _WIDE
        | {
            "num_labels": CLASSES,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "type_vocab_size": 1,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
        }
        | {"dropout_rate": 0.0}
        | _SEQ2SEQ,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, **_SPEECH, **_OFF, **_SEQ2SEQ},
    ),
}
TIMM: dict[str, dict[str, Any]] = {
    "vit": {"model_name": "test_vit", "img_size": 32},
    "convnext": {"model_name": "test_convnext"},
    "resnet": {"model_name": "test_resnet"},
}


def theirs(family: str) -> nn.Module:
    """A model of transformers."""
    import transformers

    name, values = THEIRS[family]
    made = getattr(transformers, name)
    model: nn.Module = made(made.config_class(**values))
    return model


class Samples(Dataset[Any]):
    """Inputs as the family takes them, and targets that follow from them."""

    def __init__(self, family: str) -> None:
        self.family = family

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        source = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=source)
        if self.family in TIMM:
            label = torch.tensor(index % CLASSES)
            return torch.randn(3, 32, 32, generator=source) + label, label
        if self.family == "roberta":
            return ids, ids[0] % CLASSES
        targets = torch.where(ids % 5 > 0, (3 * ids + 1) % VOCABULARY, -100)
        if self.family == "t5":
            return {"input_ids": ids.flip(0), "decoder_input_ids": ids}, targets
        if self.family == "whisper":
            sound = torch.randn(8, 2 * LENGTH, generator=source)
            return {"input_features": sound, "decoder_input_ids": ids}, targets
        return ids, targets


def samples(family: str) -> tuple[Samples, Samples]:
    """Training and evaluation data of a family, as `data.target` takes them."""
    return Samples(family), Samples(family)
