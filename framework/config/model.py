"""`model`: what is trained. Bases of the kinds that `framework/registry.py` has, in
`framework/recipes/` and in installed packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
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


class Classifier(ModelKind):
    """Base of image classifiers."""

    has_convolutions: ClassVar[bool] = True

    num_classes: PositiveCount = 10
    """Number of classes, the width of the last layer."""
    in_channels: PositiveCount = 1
    """Channels of an input image: 1 for grey, 3 for colour."""

    def form(self) -> str:
        return "images"

    def expected_image_size(self) -> int | None:
        """Height and width in pixels that the model insists on; None where any size works."""
        return getattr(self, "image_size", None)


# A named size fills in every field of a language model that is not written down.

Size = Mapping[str, Any]
# Default of such a field: pydantic takes it as none, and type checkers as one.
OF_THE_SIZE: Final[Any] = ...


class LanguageModel(ModelKind):
    """Base of transformers that read tokens. The named `size` sets each field that is left out."""

    # Whether several documents stand in a row, and none of them sees another.
    reads_packed_rows: ClassVar[bool] = False
    sizes: ClassVar[Mapping[str, Size]]
    own_fields: ClassVar[frozenset[str]] = frozenset({"kind", "size"})

    vocab_size: PositiveCount = OF_THE_SIZE
    """Number of different tokens."""
    max_positions: PositiveCount = OF_THE_SIZE
    """Tokens of the longest sequence."""
    hidden_size: PositiveCount = OF_THE_SIZE
    """Width of the vector that stands for a token between blocks."""
    num_layers: PositiveCount = OF_THE_SIZE
    """Number of transformer blocks."""
    num_heads: PositiveCount = OF_THE_SIZE
    """Attention heads of a block; a divisor of hidden_size."""
    mlp_size: PositiveCount = OF_THE_SIZE
    """Width inside the multi-layer perceptron of a block; left out, it follows hidden_size as in
    the named size.
    """
    dropout: Fraction = OF_THE_SIZE
    """Probability that a value is dropped while training: embeddings, attention weights, what a
    block adds.
    """
    norm_eps: Positive = OF_THE_SIZE
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
