"""GPT: a decoder-only transformer as a list of layers, from GPT-2 to the shape of Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, silu

from framework.config.model import MoE
from framework.models.experts import Mixture
from framework.models.initialized import (
    DEFAULT_STD,
    DrawnLinear,
    TokenEmbedding,
    as_head,
    draw,
    positions_of,
    split_heads,
)
from framework.models.layers import Layer, LayeredModel
from framework.models.sequence import attend, first_position


def rotate(*heads: Tensor, theta: float, places: Tensor | None = None) -> tuple[Tensor, ...]:
    """Turn the pair (i, i + d/2) of the vector at position p by the angle p * theta^(-2i/d).

    Rotary positions (Su et al. 2021, "RoFormer"), in the half-split order of Llama's released
    weights, of queries and keys (batch, heads, sequence, d) of one length, d and dtype, d even; the
    result has the same shapes and dtype. `places`, (batch, sequence) int64, are their positions;
    left out: as they stand in sequences.

    The angles are computed anew in float32 (float64 for such input) and never kept in a buffer:
    ZeRO-3's constructor patch and half-precision casts would round them, and a checkpoint would
    hold what is no weight.
    """
    some = heads[0]
    dtype = torch.promote_types(some.dtype, torch.float32)
    width = some.shape[-1]
    pairs = torch.arange(0, width, 2, device=some.device).to(dtype)
    if places is None:
        first = first_position(some.shape[-2])
        places = torch.arange(first, first + some.shape[-2], device=some.device)[None]
    angles = places.to(dtype)[:, None, :, None] * theta ** (-pairs / width)
    cos = angles.cos()
    sin = angles.sin()
    halves = (one.to(dtype).chunk(2, dim=-1) for one in heads)
    return tuple(
        torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(some.dtype)
        for first, second in halves
    )


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Shape of a GPT, whose fields `framework.config.model.GPT` describes; the defaults are
    GPT-2's.

    Each of `num_kv_heads` serves num_heads / num_kv_heads heads (Ainslie et al. 2023).

    Raises:
        ValueError: the head counts do not divide, or rotary heads have an odd width.
    """

    vocab_size: int
    max_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10_000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    moe: MoE | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} key/value heads, {self.num_heads} heads and "
                f"{self.hidden_size} hidden units must be multiples of one another"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"rotary positions need an even number of units per head, not {self.head_size}"
            )

    @property
    def head_size(self) -> int:
        """Units of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def residual_std(self) -> float:
        """Of the 2 x num_layers matrices that add to the residual stream (Radford et al. 2019,
        section 2.3).
        """
        return DEFAULT_STD / sqrt(2 * self.num_layers)

    def linear(self, in_features: int, out_features: int, *, std: float = DEFAULT_STD) -> nn.Module:
        return DrawnLinear(in_features, out_features, bias=self.bias, std=std)

    def make_norm(self) -> nn.Module:
        if self.norm == "rmsnorm":
            return nn.RMSNorm(self.hidden_size, eps=self.norm_eps)
        return nn.LayerNorm(self.hidden_size, eps=self.norm_eps, bias=self.bias)


class Past:
    """Keys and values of at most `capacity` tokens that a GPT has read: a further one costs a pass
    over itself alone.

    The first call of the model within `read()` takes prompts (batch, sequence), padded behind: what
    pads is seen by nothing before it, and overwritten by what follows. Later ones take the next
    token of each row, (batch, 1), and their `places`, (batch, 1) int64. `held`: by attention (2,
    batch, heads, capacity, head size).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.places: Tensor | None = None
        self.held: dict[nn.Module, Tensor] = {}

    @contextmanager
    def read(self, places: Tensor | None = None) -> Iterator[None]:
        """Let GPTs that run within the block read tokens at these places."""
        global _past
        self.places, _past = places, self
        try:
            yield
        finally:
            _past = None

    def extend(
        self, attention: nn.Module, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep keys and values (batch, heads, sequence, d); returns all, and which each row sees,
        (batch, 1, 1, capacity): None where each token sees those before it.
        """
        if self.places is None:
            self.held[attention] = pad(
                torch.stack((key, value)), (0, 0, 0, self.capacity - key.shape[2])
            )
            return key, value, None
        held = self.held[attention]
        rows = torch.arange(len(key), device=key.device)
        for kept, new in zip(held, (key, value), strict=True):
            kept[rows, :, self.places[:, 0]] = new[:, :, 0]
        seen = torch.arange(self.capacity, device=key.device) <= self.places
        return held[0], held[1], seen[:, None, None]


_past: Past | None = None


class LearnedPositions(nn.Module):
    """Adds a learned vector for each position: (batch, sequence, hidden) to the same, then
    dropout.
    """

    def __init__(self, max_positions: int, hidden_size: int, *, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size))
        draw(self.weight, std=DEFAULT_STD, truncated=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, embedded: Tensor, places: Tensor | None = None) -> Tensor:
        """Shapes as in the class docstring; ValueError for a sequence that is too long."""
        places = _past.places if _past is not None else places
        if places is None:
            added = positions_of(embedded, self.weight)
        else:
            added = self.weight[places]
        dropped: Tensor = self.dropout(embedded + added)
        return dropped


class CausalAttention(nn.Module):
    """Self-attention in which a position sees itself and what stands before: (batch, sequence,
    hidden) to the same.

    Of packed rows, whose places (batch, sequence) begin anew with each text, it sees its own text
    alone.
    """

    shares_sequences = True

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_kv_heads * shape.head_size
        self.query = shape.linear(shape.hidden_size, shape.hidden_size)
        self.key = shape.linear(shape.hidden_size, kv_size)
        self.value = shape.linear(shape.hidden_size, kv_size)
        self.output = shape.linear(shape.hidden_size, shape.hidden_size, std=shape.residual_std)

    def forward(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        shape = self.shape
        seen = None
        query, key, value = (
            split_heads(matrix(hidden), shape.head_size)
            for matrix in (self.query, self.key, self.value)
        )
        if places is not None:
            texts = (places == 0).cumsum(1)
            seen = (texts[:, None, :, None] == texts[:, None, None, :]).tril()
        places = _past.places if _past is not None else places
        if shape.positions == "rotary":
            query, key = rotate(query, key, theta=shape.rope_theta, places=places)
        if _past is not None:
            key, value, seen = _past.extend(self, key, value)
        dropout = shape.dropout if self.training else 0.0
        mixed = attend(query, key, value, attn_mask=seen, is_causal=seen is None, dropout_p=dropout)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Perceptron of a block: GELU in tanh form (as GPT-2), or SwiGLU (Shazeer 2020): down(silu(gate
    x) * up x).
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.gate = (
            shape.linear(shape.hidden_size, shape.mlp_size) if shape.mlp == "swiglu" else None
        )
        self.up = shape.linear(shape.hidden_size, shape.mlp_size)
        self.down = shape.linear(shape.mlp_size, shape.hidden_size, std=shape.residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        up = self.up(hidden)
        inner = gelu(up, approximate="tanh") if self.gate is None else silu(self.gate(hidden)) * up
        output: Tensor = self.down(inner)
        return output


class GPTBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); (batch, sequence, hidden) to
    the same, beside the places of packed rows where there are any.
    """

    def __init__(self, shape: GPTShape, number: int = 0) -> None:
        super().__init__()
        self.attention_norm = shape.make_norm()
        self.attention = CausalAttention(shape)
        self.mlp_norm = shape.make_norm()
        make = partial(MLP, shape)
        if shape.moe is not None and shape.moe.is_in(number):
            moe = shape.moe
        else:
            moe = None
        self.mlp = Mixture(moe, shape.hidden_size, make_expert=make) if moe is not None else make()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        hidden, *places = value if isinstance(value, tuple) else (value,)
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), *places))
        hidden = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return (hidden, *places) if places else hidden


def _beside_places(module: nn.Module, value: Any) -> Any:
    if isinstance(value, tuple):
        return (module(value[0]), value[1])
    return module(value)


def _with_places(module: nn.Module, value: Any) -> Any:
    if isinstance(value, tuple):
        return (module(*value), value[1])
    return module(value)


def _without_places(module: nn.Module, value: Any) -> Any:
    return module(value[0] if isinstance(value, tuple) else value)


class GPT(LayeredModel):
    """Causal language model.

    Input: tokens (batch, sequence) int64, at most `max_positions` of them where positions are
    learned; of rows in which several texts are packed the place of each token in its text, too
    (`position_ids`). Output: logits (batch, sequence, vocab_size). Between layers goes one tensor
    (batch, sequence, hidden), and the places where there are any.

    Weights start from N(0, 0.02^2), those that add to the residual stream from N(0, 0.02^2 / (2
    num_layers)), biases from zero (Radford et al. 2018, section 4.1; 2019, section 2.3).
    """

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "embed": "vocabulary",
        "head": "vocabulary",
        "blocks.*.attention": "shared_input",
        "blocks.*.attention.query": "column",
        "blocks.*.attention.key": "column",
        "blocks.*.attention.value": "column",
        "blocks.*.attention.output": "row",
        "blocks.*.mlp": "shared_input",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
    }

    def __init__(self, shape: GPTShape) -> None:
        super().__init__(list(gpt_layers(shape)))
        self.shape = shape

    @classmethod
    def of(cls, moe: Mapping[str, Any] | None = None, **shape: Any) -> GPT:
        """A GPT from the attributes of `GPTShape`, and of `MoE` where it has experts."""
        return cls(GPTShape(moe=MoE(**moe) if moe else None, **shape))

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, by transformers' name for it."""
        return self.get_submodule(self.place_of(self.recipes[-1]))


def gpt_layers(shape: GPTShape) -> list[Layer]:
    """Recipes: embedding, positions and dropout, blocks, norm, head."""
    embed = partial(TokenEmbedding, shape.vocab_size, shape.hidden_size)
    blocks = [
        Layer(f"blocks.{number}", partial(GPTBlock, shape, number))
        for number in range(shape.num_layers)
    ]
    second = Layer("dropout", partial(nn.Dropout, shape.dropout), call=_beside_places)
    if shape.positions == "learned":
        make = partial(
            LearnedPositions, shape.max_positions, shape.hidden_size, dropout=shape.dropout
        )
        second = Layer("positions", make, call=_with_places)
    middle = [second, *blocks, Layer("norm", shape.make_norm, call=_without_places)]
    if shape.tie_embeddings:
        return [
            Layer("embed", embed, tied="embed"),
            *middle,
            Layer("head", embed, call=as_head, tied="embed"),
        ]
    head = partial(DrawnLinear, shape.hidden_size, shape.vocab_size, bias=False)
    return [Layer("embed", embed), *middle, Layer("head", head)]
