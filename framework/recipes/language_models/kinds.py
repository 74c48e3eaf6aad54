"""Sections of language models, with their named sizes: GPT and BERT."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from framework.config.base import Positive, PositiveCount
from framework.config.data import BYTE_VOCAB_SIZE
from framework.config.model import OF_THE_SIZE, LanguageModel, MoE, Size

_TRANSFORMERS: Final = "framework.recipes.language_models:transformers.json"

_GPT2: Final[Size] = {
    "vocab_size": 50257,
    "max_positions": 1024,
    "positions": "learned",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "mlp": "gelu",
    "bias": True,
    "dropout": 0.1,
    "tie_embeddings": True,
    "rope_theta": 10_000.0,
}
_LLAMA: Final[Size] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "mlp": "swiglu",
    "bias": False,
    "dropout": 0.0,
    "tie_embeddings": False,
    "rope_theta": 10_000.0,
}


def _shape(hidden_size: int, num_layers: int, num_heads: int, **others: Any) -> Size:
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "mlp_size": 4 * hidden_size,
    } | others


# GPT-2: Radford et al. 2019, table 2, with the number of heads from the released models. Llama: the
# released config.json files. tiny: bytes (256 and five special tokens), for a laptop.
GPT_SIZES: Final[Mapping[str, Size]] = MappingProxyType(
    {
        "tiny": {
            **_GPT2,
            **_shape(128, 4, 4, num_kv_heads=4, vocab_size=BYTE_VOCAB_SIZE, max_positions=256),
        },
        "gpt2": {**_GPT2, **_shape(768, 12, 12, num_kv_heads=12)},
        "gpt2-medium": {**_GPT2, **_shape(1024, 24, 16, num_kv_heads=16)},
        "gpt2-large": {**_GPT2, **_shape(1280, 36, 20, num_kv_heads=20)},
        "gpt2-xl": {**_GPT2, **_shape(1600, 48, 25, num_kv_heads=25)},
        "tinyllama-1.1b": {
            **_LLAMA,
            **_shape(
                2048, 22, 32, num_kv_heads=4, mlp_size=5632, vocab_size=32000, max_positions=2048
            ),
        },
        "llama-2-7b": {
            **_LLAMA,
            **_shape(
                4096, 32, 32, num_kv_heads=32, mlp_size=11008, vocab_size=32000, max_positions=4096
            ),
        },
        "llama-3-8b": {
            **_LLAMA,
            **_shape(
                4096,
                32,
                32,
                num_kv_heads=8,
                mlp_size=14336,
                vocab_size=128256,
                max_positions=8192,
                rope_theta=500_000.0,
            ),
        },
    }
)

_BERT: Final[Size] = {
    "vocab_size": 30522,
    "max_positions": 512,
    "num_types": 2,
    "dropout": 0.1,
    "norm_eps": 1e-12,
}
# base, large: Devlin et al. 2018, section 3. tiny to medium: Turc et al. 2019, "Well-Read Students
# Learn Better", table 1.
BERT_SIZES: Final[Mapping[str, Size]] = MappingProxyType(
    {
        "tiny": {**_BERT, **_shape(128, 2, 2)},
        "mini": {**_BERT, **_shape(256, 4, 4)},
        "small": {**_BERT, **_shape(512, 4, 8)},
        "medium": {**_BERT, **_shape(512, 8, 8)},
        "base": {**_BERT, **_shape(768, 12, 12)},
        "large": {**_BERT, **_shape(1024, 24, 16)},
    }
)


class GPT(LanguageModel):
    """Decoder-only transformer, from GPT-2 (Radford et al. 2019) to the shape of Llama (Touvron et
    al. 2023).
    """

    builds: ClassVar[str] = "framework.recipes.language_models.gpt:GPT.of"
    work: ClassVar[str] = "framework.recipes.language_models.work:gpt"
    transformers_table: ClassVar[str] = _TRANSFORMERS
    reads_packed_rows: ClassVar[bool] = True
    sizes: ClassVar[Mapping[str, Size]] = GPT_SIZES
    kind: Literal["gpt"] = "gpt"
    size: Literal[
        "tiny",
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
        "tinyllama-1.1b",
        "llama-2-7b",
        "llama-3-8b",
    ] = "tiny"
    """Named size: what every other field is unless it is written down. tiny: bytes, for a laptop;
    the others as published.
    """
    num_kv_heads: PositiveCount = OF_THE_SIZE
    """Heads of keys and values, a divisor of num_heads; fewer than num_heads share them
    (grouped-query attention).
    """
    positions: Literal["learned", "rotary"] = OF_THE_SIZE
    """How a token's place is told: a learned vector that is added, or a rotation of queries and
    keys (Su et al. 2021).
    """
    rope_theta: Positive = OF_THE_SIZE
    """Base of the rotary wavelengths."""
    norm: Literal["layernorm", "rmsnorm"] = OF_THE_SIZE
    """Normalisation before attention, before the perceptron and at the end."""
    mlp: Literal["gelu", "swiglu"] = OF_THE_SIZE
    """Perceptron of a block: two matrices around GELU (tanh form, as GPT-2), or three with a gate
    (Shazeer 2020).
    """
    bias: bool = OF_THE_SIZE
    """Whether linear layers and layernorm have a bias."""
    tie_embeddings: bool = OF_THE_SIZE
    """Whether the output layer uses the matrix of the token embedding."""
    moe: MoE | None = None
    """Experts in place of the perceptrons of some blocks."""

    def form(self) -> str:
        return "text"


class BERT(LanguageModel):
    """BERT (Devlin et al. 2018) with the heads of its pre-training, masked tokens and next
    sentence; or for classes.
    """

    builds: ClassVar[str] = "framework.recipes.language_models.bert:BERT.of"
    work: ClassVar[str] = "framework.recipes.language_models.work:bert"
    transformers_table: ClassVar[str] = _TRANSFORMERS
    sizes: ClassVar[Mapping[str, Size]] = BERT_SIZES
    kind: Literal["bert"] = "bert"
    size: Literal["tiny", "mini", "small", "medium", "base", "large"] = "tiny"
    """Named size: what every other field is unless it is written down."""
    num_types: PositiveCount = OF_THE_SIZE
    """Number of segments that a token may belong to."""
    num_classes: PositiveCount | None = None
    """Classes of a text, from a head on [CLS]; null: the heads of pre-training."""

    def form(self) -> str:
        return "labelled_text" if self.num_classes else "text_pairs"
