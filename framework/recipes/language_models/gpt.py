"""GPT: a decoder-only transformer as a list of layers, from GPT-2 to the shape of Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from framework.config.model import MoE
from framework.models.experts import MixtureOfExperts
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
from framework.models.products import apart, apply_linears, swiglu
from framework.models.sequence import attend
from framework.recipes.language_models.rotary import turn, turns_for

if TYPE_CHECKING:  # rows of one text each need none of it
    from framework.models.packed_attention import PackedRows

_Rows: TypeAlias = "PackedRows | Tensor"  # where the texts of packed rows are, or their places


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Shape of a GPT; the defaults are GPT-2's, and `kinds.GPT` describes the
    fields.

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
        """Standard deviation of the 2 x num_layers matrices that add to the residual stream
        (Radford et al. 2019, section 2.3).
        """
        return DEFAULT_STD / sqrt(2 * self.num_layers)

    def turns(self, hidden: Tensor, places: Tensor | None) -> Tensor | None:
        """Return the angles by which all blocks turn queries and keys, as `turns_for` does; None
        where positions are learned.
        """
        if self.positions == "learned":
            return None
        if _past is not None:
            places = _past.places
        return turns_for(hidden, head_size=self.head_size, theta=self.rope_theta, places=places)

    def linear(self, in_features: int, out_features: int, *, std: float = DEFAULT_STD) -> nn.Module:
        return DrawnLinear(in_features, out_features, bias=self.bias, std=std)

    def make_norm(self) -> nn.Module:
        if self.norm == "rmsnorm":
            return nn.RMSNorm(self.hidden_size, eps=self.norm_eps)
        return nn.LayerNorm(self.hidden_size, eps=self.norm_eps, bias=self.bias)


class Past:
    """Keys and values of at most `capacity` tokens that a GPT has read: a further token costs a
    pass over itself alone.

    The first call of the model within `read()` takes prompts (batch, sequence), padded at their
    end: no token sees the padding, and the tokens that follow overwrite it. Later calls take the
    next token of each row, (batch, 1), and their `places`, (batch, 1) int64.

    Attributes:
        capacity: the largest number of tokens.
        places: of the tokens that are being read; None for prompts.
        held: attention module -> its keys and values (2, batch, heads, capacity, head size).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.places: Tensor | None = None
        self.held: dict[nn.Module, Tensor] = {}

    @contextmanager
    def read(self, places: Tensor | None = None) -> Iterator[None]:
        """Let GPTs of this process that run within the block keep and use these keys and values,
        and read tokens at `places`; None: they read prompts.
        """
        global _past
        self.places = places
        _past = self
        try:
            yield
        finally:
            _past = None

    def extend(
        self, attention: nn.Module, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep the keys and values (batch, heads, sequence, d) of an attention.

        Returns:
            All keys and all values that it has, and a mask (batch, 1, 1, capacity) of those that
            each row sees; None in its place where each token sees those before it.
        """
        if self.places is None:
            num_free = self.capacity - key.shape[2]
            self.held[attention] = pad(torch.stack((key, value)), (0, 0, 0, num_free))
            return key, value, None
        all_keys, all_values = self.held[attention]
        rows = torch.arange(len(key), device=key.device)
        all_keys[rows, :, self.places[:, 0]] = key[:, :, 0]
        all_values[rows, :, self.places[:, 0]] = value[:, :, 0]
        is_seen = torch.arange(self.capacity, device=key.device) <= self.places
        return all_keys, all_values, is_seen[:, None, None]


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

    def forward(self, embedded: Tensor, rows: _Rows | None = None) -> Tensor:
        """Shapes as in the class docstring; ValueError for a sequence that is too long."""
        places = _places_of(rows)
        if _past is not None:
            places = _past.places
        if places is None:
            vectors = positions_of(embedded, self.weight)
        else:
            vectors = self.weight[places]
        dropped: Tensor = self.dropout(embedded + vectors)
        return dropped


class CausalAttention(nn.Module):
    """Self-attention in which a position sees itself and those before it: (batch, sequence, hidden)
    to the same shape.

    In packed rows a position sees its own text alone. `turns` are the angles of rotary positions
    (`GPTShape.turns`), None elsewhere.
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

    def forward(
        self,
        hidden: Tensor,
        rows: _Rows | None = None,
        turns: Tensor | None = None,
    ) -> Tensor:
        shape = self.shape
        projected = apply_linears(hidden, self.query, self.key, self.value)
        query, key, value = (split_heads(each, shape.head_size) for each in projected)
        if turns is not None:
            query = turn(query, turns)
            key = turn(key, turns)
            value = apart(value)  # query and key as they were are not needed any more
        dropout = shape.dropout if self.training else 0.0
        if rows is not None:
            mixed = _attend_in_rows(query, key, value, rows, dropout=dropout)
        else:
            mask = None
            if _past is not None:
                key, value, mask = _past.extend(self, key, value)
            mixed = attend(
                query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout
            )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def _attend_in_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: _Rows, *, dropout: float
) -> Tensor:
    """Attend within the texts of packed rows; through a mask of all pairs where a model that runs
    layer by layer has only their places.
    """
    from framework.models.packed_attention import attend_within_texts, texts_mask

    if isinstance(rows, tuple):
        return attend_within_texts(query, key, value, rows, dropout=dropout)
    mask = texts_mask(rows)
    return attend(query, key, value, attn_mask=mask, is_causal=False, dropout_p=dropout)


class FeedForward(nn.Module):
    """Perceptron of a block: GELU in tanh form (as GPT-2), or SwiGLU (Shazeer 2020): down(silu(gate
    x) * up x).
    """

    takes_positions_apart = True

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.gate: nn.Module | None = None
        if shape.mlp == "swiglu":
            self.gate = shape.linear(shape.hidden_size, shape.mlp_size)
        self.up = shape.linear(shape.hidden_size, shape.mlp_size)
        self.down = shape.linear(shape.mlp_size, shape.hidden_size, std=shape.residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute (batch, sequence, hidden) from the same shape."""
        if self.gate is None:
            inner = gelu(self.up(hidden), approximate="tanh")
        else:
            gate, up = apply_linears(hidden, self.gate, self.up)
            inner = swiglu(gate, up)
        output: Tensor = self.down(inner)
        return output


class GPTBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).

    Takes hidden (batch, sequence, hidden), or the tuple of it and the texts of packed rows, or
    their places; returns the same. `turns` are `GPTShape.turns`; it makes them itself if it gets
    none.
    """

    def __init__(self, shape: GPTShape, number: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = shape.make_norm()
        self.attention = CausalAttention(shape)
        self.mlp_norm = shape.make_norm()
        make_perceptron = partial(FeedForward, shape)
        self.mlp: nn.Module
        if shape.moe is not None and shape.moe.is_in(number):
            self.mlp = MixtureOfExperts(shape.moe, shape.hidden_size, make_expert=make_perceptron)
        else:
            self.mlp = make_perceptron()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, value: Tensor | tuple[Tensor, _Rows], turns: Tensor | None = None
    ) -> Tensor | tuple[Tensor, _Rows]:
        hidden, rows = _hidden_and_rows(value)
        if turns is None:
            turns = self.shape.turns(hidden, _places_of(rows))
        mixed = self.attention(self.attention_norm(hidden), rows, turns)
        hidden = hidden + self.dropout(mixed)
        output: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        if rows is None:
            return output
        return output, rows


def _hidden_and_rows(value: Tensor | tuple[Tensor, _Rows]) -> tuple[Tensor, _Rows | None]:
    """Take what goes between layers apart; the second is None where rows are not packed."""
    if isinstance(value, tuple):
        return value
    return value, None


def _places_of(rows: _Rows | None) -> Tensor | None:
    """Return the places of the tokens of packed rows, (batch, sequence) int64."""
    if isinstance(rows, tuple):
        return rows.places
    return rows


def _with_turns(shape: GPTShape, block: nn.Module, value: Any) -> Any:
    """Apply a block, and hand it the table of rotary positions, which a compiled block would make
    anew.
    """
    hidden, rows = _hidden_and_rows(value)
    return block(value, shape.turns(hidden, _places_of(rows)))


def _beside_rows(module: nn.Module, value: Any) -> Any:
    """Apply a layer to hidden vectors, and pass on the texts of packed rows beside them."""
    if isinstance(value, tuple):
        return (module(value[0]), value[1])
    return module(value)


def _with_rows(module: nn.Module, value: Any) -> Any:
    """Apply a layer to hidden vectors and the texts of packed rows, and pass the texts on."""
    if isinstance(value, tuple):
        return (module(*value), value[1])
    return module(value)


def _without_rows(module: nn.Module, value: Any) -> Any:
    """Apply a layer to hidden vectors, and drop the texts of packed rows."""
    if isinstance(value, tuple):
        return module(value[0])
    return module(value)


class GPT(LayeredModel):
    """Causal language model.

    Input: tokens (batch, sequence) int64, at most `max_positions` of them where positions are
    learned; where rows pack several texts, also the place of each token in its text
    (`position_ids`). Output: logits (batch, sequence, vocab_size). Between layers goes one tensor
    (batch, sequence, hidden), and beside it, if the input has places, the texts of packed rows,
    which are found once (`packed_rows`).

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
        "blocks.*.mlp.experts.*.gate": "column",
        "blocks.*.mlp.experts.*.up": "column",
        "blocks.*.mlp.experts.*.down": "row",
    }

    def __init__(self, shape: GPTShape) -> None:
        super().__init__(list(gpt_layers(shape)))
        self.shape = shape

    @classmethod
    def of(cls, moe: Mapping[str, Any] | None = None, **shape: Any) -> GPT:
        """Build a GPT from the attributes of `GPTShape`; `moe` has the attributes of `MoE`."""
        experts = MoE(**moe) if moe else None
        return cls(GPTShape(moe=experts, **shape))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run all layers on tokens, or on tokens and their places in texts."""
        inputs += tuple(named_inputs.values())
        if len(inputs) == 2:
            inputs = self.enter_stage(inputs)
        return super().forward(*inputs)

    def enter_stage(self, value: Any) -> Any:
        """Find the texts of packed rows by the places of their tokens, which come second in a
        tuple.
        """
        if not isinstance(value, tuple):
            return value
        from framework.models.packed_attention import packed_rows

        first, places = value
        if len(places) != len(first):
            places = places.expand(len(first), -1)
        rows = packed_rows(places, length=first.shape[1])
        has_table = self.shape.positions == "learned"
        if has_table and rows.longest > self.shape.max_positions:
            raise ValueError(
                f"a text of {rows.longest} tokens; the model has {self.shape.max_positions} "
                "positions"
            )
        return first, rows

    def leave_stage(self, value: Any) -> Any:
        """Turn the texts of packed rows into the places of their tokens, which can be sent."""
        if not isinstance(value, tuple):
            return value
        from framework.models.packed_attention import PackedRows

        hidden, rows = value
        if isinstance(rows, PackedRows):
            rows = rows.whole_places
        return hidden, rows

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer; the method's name is that of transformers."""
        return self.get_submodule(self.place_of(self.recipes[-1]))


def gpt_layers(shape: GPTShape) -> list[Layer]:
    """List the layers: embedding, positions or dropout, blocks, norm, head."""
    embed = partial(TokenEmbedding, shape.vocab_size, shape.hidden_size)
    if shape.tie_embeddings:
        first = Layer("embed", embed, tied="embed")
        last = Layer("head", embed, call=as_head, tied="embed")
    else:
        first = Layer("embed", embed)
        make_head = partial(DrawnLinear, shape.hidden_size, shape.vocab_size, bias=False)
        last = Layer("head", make_head)
    if shape.positions == "learned":
        make_positions = partial(
            LearnedPositions, shape.max_positions, shape.hidden_size, dropout=shape.dropout
        )
        second = Layer("positions", make_positions, call=_with_rows)
    else:
        second = Layer("dropout", partial(nn.Dropout, shape.dropout), call=_beside_rows)
    layers = [first, second]
    call = None
    if shape.positions == "rotary":
        call = partial(_with_turns, shape)
    for number in range(shape.num_layers):
        layers.append(Layer(f"blocks.{number}", partial(GPTBlock, shape, number), call=call))
    layers.append(Layer("norm", shape.make_norm, call=_without_rows))
    layers.append(last)
    return layers
