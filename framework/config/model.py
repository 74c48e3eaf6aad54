"""`model`: what is trained. A new model is a class here (its registry line) and its module in
`framework/models/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from framework.config.base import (
    Fraction,
    ModelKind,
    Object,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    Target,
)
from framework.config.data import BYTE_VOCAB_SIZE


class Classifier(ModelKind):
    """Base of all image classifiers."""

    has_convolutions: ClassVar[bool] = True

    num_classes: PositiveCount = 10
    """Number of classes, the width of the last layer."""
    in_channels: PositiveCount = 1
    """Channels of an input image: 1 for grey, 3 for colour."""

    def expected_image_size(self) -> int | None:
        """Height and width in pixels that the model insists on; None where any size works."""
        return getattr(self, "image_size", None)


class LeNet(Classifier):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, as used on MNIST and Fashion-MNIST."""

    builds: ClassVar[str] = "framework.models.small_nets:LeNet"
    kind: Literal["lenet"] = "lenet"
    image_size: Literal[28, 32] = 28
    """Height and width of an input image in pixels; 28 is padded to 32 by the first convolution."""


class SmallResNet18(Classifier):
    """ResNet-18 (He et al. 2015) for small images: a 3x3 stem without pooling, as in the
    Fashion-MNIST literature.
    """

    builds: ClassVar[str] = "framework.models.resnet:SmallResNet18"
    has_batch_norm: ClassVar[bool] = True
    kind: Literal["small_resnet18"] = "small_resnet18"


class _TorchvisionResNet(Classifier):
    """Base of torchvision's ResNets; the defaults are those for ImageNet."""

    has_batch_norm: ClassVar[bool] = True
    num_classes: PositiveCount = 1000
    in_channels: PositiveCount = 3


class ResNet18(_TorchvisionResNet):
    """torchvision's ResNet-18 (7x7 stem), untrained."""

    builds: ClassVar[str] = "framework.models.resnet:resnet18"
    kind: Literal["resnet18"] = "resnet18"


class ResNet50(_TorchvisionResNet):
    """torchvision's ResNet-50 (7x7 stem), untrained."""

    builds: ClassVar[str] = "framework.models.resnet:resnet50"
    kind: Literal["resnet50"] = "resnet50"


class MLP(Classifier):
    """Multi-layer perceptron on flattened images: linear, ReLU, dropout, repeated."""

    builds: ClassVar[str] = "framework.models.small_nets:MLP"
    has_convolutions: ClassVar[bool] = False
    kind: Literal["mlp"] = "mlp"
    image_size: PositiveCount = 28
    """Height and width of an input image in pixels."""
    hidden_sizes: list[PositiveCount] = [256, 256]
    """Width of each hidden layer; an empty list gives a linear classifier."""
    dropout: Fraction = 0.0
    """Probability that a hidden unit is dropped while training."""


# A named size fills in every field of a language model that is not written down.

Size = Mapping[str, Any]

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


class _LanguageModel(ModelKind):
    """Base of all language models. The named `size` sets each field that is left out."""

    sizes: ClassVar[Mapping[str, Size]]
    own_fields: ClassVar[frozenset[str]] = frozenset({"kind", "size"})

    vocab_size: PositiveCount
    """Number of different tokens."""
    max_positions: PositiveCount
    """Tokens of the longest sequence."""
    hidden_size: PositiveCount
    """Width of the vector that stands for a token between blocks."""
    num_layers: PositiveCount
    """Number of transformer blocks."""
    num_heads: PositiveCount
    """Attention heads of a block; a divisor of hidden_size."""
    mlp_size: PositiveCount
    """Width inside the multi-layer perceptron of a block; left out, it follows hidden_size as in
    the named size.
    """
    dropout: Fraction
    """Probability that a value is dropped while training: embeddings, attention weights, what a
    block adds.
    """
    norm_eps: Positive
    """Added to the variance in a normalisation."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in the fields of the named size, so that the resolved config and every rule see
        numbers.
        """
        if not isinstance(values, Mapping):
            return values
        default: str = cls.model_fields["size"].default
        size = values.get("size", default)
        # An unknown size gets the default's fields, so that pydantic complains of it alone.
        if not isinstance(size, str) or size not in cls.sizes:
            size = default
        return _scaled(cls.sizes[size], values) | dict(values)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        for name in schema.pop("required", ()):
            if name in schema["properties"]:
                schema["properties"][name]["description"] += " Left out: as the named size has it."
        return schema


class MoE(Section):
    """Experts: several perceptrons in a block, of which each token takes one or two (Lepikhin et
    al. 2020, GShard; Fedus et al. 2021, Switch).
    """

    num_experts: Annotated[int, Field(ge=2)]
    """Experts of a block, each as wide as the perceptron in whose place they stand."""
    top_k: Literal[1, 2] = 1
    """Experts that a token takes: 1 as Switch, 2 as GShard and Mixtral."""
    capacity_factor: Positive | None = 1.25
    """Room of an expert in training, as a multiple of what it gets where tokens spread evenly over
    the experts, in a micro-batch of a rank; tokens beyond it pass the block by. null: room for all,
    and num_experts / top_k times the work.
    """
    eval_capacity_factor: Positive | None = 2.0
    """The same in evaluation."""
    min_capacity: PositiveCount = 4
    """Tokens that an expert has room for at least."""
    every: PositiveCount = 2
    """Of so many blocks one after the other the last has experts; 1: all."""
    balance_loss: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight of the loss that spreads tokens over experts; 1 times this where they are spread
    evenly.
    """
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the loss that keeps the router's logits small (Zoph et al. 2022, ST-MoE: 0.001)."""
    jitter: Fraction = 0.0
    """Noise on what the router sees in training: factors between 1 - jitter and 1 + jitter (Switch:
    0.01).
    """

    def is_in(self, block: int) -> bool:
        """Check whether a block, counted from 0, has experts."""
        return (block + 1) % self.every == 0

    def capacity(self, num_tokens: int, *, training: bool = True) -> int:
        """Return the number of tokens, of a micro-batch's `num_tokens`, that an expert has room
        for.
        """
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor is None:
            return num_tokens
        capacity = ceil(factor * self.top_k * num_tokens / self.num_experts)
        return min(num_tokens, max(self.min_capacity, capacity))


class GPT(_LanguageModel):
    """Decoder-only transformer, from GPT-2 (Radford et al. 2019) to the shape of Llama (Touvron et
    al. 2023).
    """

    builds: ClassVar[str] = "framework.models.gpt:GPT.of"
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
    num_kv_heads: PositiveCount
    """Heads of keys and values, a divisor of num_heads; fewer than num_heads share them
    (grouped-query attention).
    """
    positions: Literal["learned", "rotary"]
    """How a token's place is told: a learned vector that is added, or a rotation of queries and
    keys (Su et al. 2021).
    """
    rope_theta: Positive
    """Base of the rotary wavelengths."""
    norm: Literal["layernorm", "rmsnorm"]
    """Normalisation before attention, before the perceptron and at the end."""
    mlp: Literal["gelu", "swiglu"]
    """Perceptron of a block: two matrices around GELU (tanh form, as GPT-2), or three with a gate
    (Shazeer 2020).
    """
    bias: bool
    """Whether linear layers and layernorm have a bias."""
    tie_embeddings: bool
    """Whether the output layer uses the matrix of the token embedding."""
    moe: MoE | None = None
    """Experts in place of the perceptrons of some blocks."""


class BERT(_LanguageModel):
    """BERT (Devlin et al. 2018) with the heads of its pre-training, masked tokens and next
    sentence; or for classes.
    """

    builds: ClassVar[str] = "framework.models.bert:BERT.of"
    sizes: ClassVar[Mapping[str, Size]] = BERT_SIZES
    kind: Literal["bert"] = "bert"
    size: Literal["tiny", "mini", "small", "medium", "base", "large"] = "tiny"
    """Named size: what every other field is unless it is written down."""
    num_types: PositiveCount
    """Number of segments that a token may belong to."""
    num_classes: PositiveCount | None = None
    """Classes of a text, from a head on [CLS]; null: the heads of pre-training."""


def _scaled(size: Size, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the named size, scaled to the config's.

    `mlp_size` keeps its ratio to `hidden_size`, and `num_kv_heads` to `num_heads`, where the config
    sets the latter.
    """
    scaled = dict(size)
    for name, base in (("mlp_size", "hidden_size"), ("num_kv_heads", "num_heads")):
        value = values.get(base)
        if name in size and isinstance(value, (int, float)) and value >= 1 and value == value // 1:
            scaled[name] = max(1, size[name] * int(value) // size[base])
    return scaled


ModelSection = Annotated[ModelKind | Target | Object, OneOf()]
