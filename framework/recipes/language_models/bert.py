"""BERT, the network of kind `bert`, with both heads of its pre-training (Devlin et al. 2018), as a
list of layers.

Between layers goes one floating tensor, followed by the integer tensors that later layers still
need; DeepSpeed's pipeline sends several floating tensors badly. The pooled [CLS] vector therefore
travels as one more position of the sequence. Only the last layer gets two floating tensors, and no
stage may start with it: it holds what the decoder, which is tied to the embedding, must not hold
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from framework.models.initialized import (
    DEFAULT_STD,
    DrawnEmbedding,
    DrawnLinear,
    TokenEmbedding,
    draw,
    positions_of,
    split_heads,
)
from framework.models.layers import Layer, LayeredModel
from framework.models.products import apply_linears
from framework.models.sequence import attend
from framework.models.tiled_loss import TiledLoss


@dataclass(frozen=True, kw_only=True)
class BERTShape:
    """Shape of a BERT; `kinds.BERT` describes the fields.

    Raises:
        ValueError: the heads do not divide the hidden units.
    """

    vocab_size: int
    max_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    num_types: int = 2
    dropout: float = 0.1
    norm_eps: float = 1e-12
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{self.hidden_size} hidden units must be a multiple of {self.num_heads} heads"
            )

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        return DrawnLinear(in_features, out_features, truncated=True)

    def make_norm(self) -> nn.Module:
        return nn.LayerNorm(self.hidden_size, eps=self.norm_eps)


class TiedTokenEmbedding(TokenEmbedding):
    """First layer and decoder.

    First: (tokens, types, mask), each (batch, sequence) int64, to (vectors (batch, sequence,
    hidden), types, mask). Decoder: (batch, sequence + 1, hidden) to (logits (batch, sequence,
    vocabulary) without bias, the last position).
    """

    def forward(self, value: Any, *, as_decoder: bool = False) -> Any:  # type: ignore[override]
        if as_decoder:
            return self.logits(value[:, :-1]), value[:, -1]
        tokens, types, mask = value
        return self.look_up(tokens), types, mask


class OtherEmbeddings(nn.Module):
    """Adds position and segment vectors: (vectors, types, mask) to (vectors, mask)."""

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(shape.max_positions, shape.hidden_size))
        draw(self.positions, std=DEFAULT_STD, truncated=True)
        self.types = DrawnEmbedding(shape.num_types, shape.hidden_size, truncated=True)
        self.norm = shape.make_norm()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Shapes as for `TiedTokenEmbedding`; ValueError for a sequence that is too long."""
        embedded, types, mask = value
        positions = positions_of(embedded, self.positions)
        return self.dropout(self.norm(embedded + positions + self.types(types))), mask


class MaskedAttention(nn.Module):
    """Self-attention in which no position sees padding.

    Takes hidden (batch, sequence, hidden) and a mask (batch, sequence) with 0 for padding; returns
    (batch, sequence, hidden). Where ranks share sequences, the mask still has all positions.
    """

    shares_sequences = True

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        self.dropout = shape.dropout
        size = shape.hidden_size
        self.query = shape.linear(size, size)
        self.key = shape.linear(size, size)
        self.value = shape.linear(size, size)
        self.output = shape.linear(size, size)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        projected = apply_linears(hidden, self.query, self.key, self.value)
        query, key, value = (split_heads(each, self.head_size) for each in projected)
        attention_mask = (mask != 0)[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, attn_mask=attention_mask, dropout_p=dropout)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class BERTBlock(nn.Module):
    """Post-norm block: norm(x + attention(x)), then norm(x + mlp(x)); (hidden, mask) to (hidden,
    mask).
    """

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.attention = MaskedAttention(shape)
        self.attention_norm = shape.make_norm()
        self.up = shape.linear(shape.hidden_size, shape.mlp_size)
        self.down = shape.linear(shape.mlp_size, shape.hidden_size)
        self.mlp_norm = shape.make_norm()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = value
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, mask)))
        return self.mlp_norm(hidden + self.dropout(self.down(gelu(self.up(hidden))))), mask


class PoolerAndTransform(nn.Module):
    """Layer between the last block and both outputs: (hidden (batch, sequence, hidden), mask) to
    (batch, sequence + 1, hidden).

    Positions before the last: norm(gelu(dense x)), for the decoder. The last: tanh(dense x) of the
    first position, [CLS].
    """

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.pooler = shape.linear(shape.hidden_size, shape.hidden_size)
        self.transform = shape.linear(shape.hidden_size, shape.hidden_size)
        self.norm = shape.make_norm()

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        hidden, _ = value
        transformed = self.norm(gelu(self.transform(hidden)))
        pooled = torch.tanh(self.pooler(hidden[:, :1]))
        return torch.cat((transformed, pooled.to(transformed.dtype)), dim=1)


class Outputs(nn.Module):
    """Bias of the decoder, and next-sentence prediction.

    (logits (batch, sequence, vocabulary), pooled (batch, hidden)) to (logits, next-sentence logits
    (batch, 2)). A `TiledLoss` in place of the logits includes the bias already.
    """

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))
        self.next_sentence = shape.linear(shape.hidden_size, 2)

    def forward(
        self, value: tuple[Tensor | TiledLoss, Tensor]
    ) -> tuple[Tensor | TiledLoss, Tensor]:
        logits, pooled = value
        if not isinstance(logits, TiledLoss):
            logits = logits + self.bias
        return logits, self.next_sentence(pooled)


class ClassHead(nn.Module):
    """Logits of classes from [CLS] (Devlin et al. 2018, section 4.1): (hidden, mask) to (batch,
    classes).
    """

    def __init__(self, shape: BERTShape) -> None:
        super().__init__()
        assert shape.num_classes is not None
        self.pooler = shape.linear(shape.hidden_size, shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)
        self.output = shape.linear(shape.hidden_size, shape.num_classes)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        hidden, _ = value
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class BERT(LayeredModel):
    """BERT for pre-training, or with a head for classes.

    Input: tokens, segment numbers and attention mask (0 for padding), each (batch, sequence) int64.
    Output: logits of the tokens (batch, sequence, vocab_size), and of whether the second segment
    follows the first (batch, 2); or of classes (batch, num_classes).

    Weights start from N(0, 0.02^2) cut off at two standard deviations, biases from zero, as in the
    paper's code.
    """

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "embed": "vocabulary",
        "outputs.bias": "vocabulary",
        "blocks.*.attention": "shared_input",
        "blocks.*.attention.query": "column",
        "blocks.*.attention.key": "column",
        "blocks.*.attention.value": "column",
        "blocks.*.attention.output": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    }

    def __init__(self, shape: BERTShape) -> None:
        super().__init__(bert_layers(shape))
        self.shape = shape

    @classmethod
    def of(cls, **shape: Any) -> BERT:
        """Build a BERT from the attributes of `BERTShape`."""
        return cls(BERTShape(**shape))

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the layer that makes logits of tokens, and give it the bias that losses in tiles
        add (`head_bias`); None with a head for classes. The method's name is that of transformers.
        """
        if self.shape.num_classes:
            return None
        embed = self.get_submodule("embed")
        if isinstance(embed, TokenEmbedding):
            embed.head_bias = [self.get_parameter("outputs.bias")]
        return embed


def bert_layers(shape: BERTShape) -> list[Layer]:
    """List the layers: token embedding, other embeddings, blocks; then the head of classes, or
    pooler and transform, decoder and outputs.
    """
    embed = partial(TiedTokenEmbedding, shape.vocab_size, shape.hidden_size, truncated=True)
    body = [Layer("embeddings", partial(OtherEmbeddings, shape))]
    for number in range(shape.num_layers):
        body.append(Layer(f"blocks.{number}", partial(BERTBlock, shape)))
    if shape.num_classes:
        return [Layer("embed", embed), *body, Layer("classes", partial(ClassHead, shape))]
    return [
        Layer("embed", embed, tied="embed"),
        *body,
        Layer("heads", partial(PoolerAndTransform, shape)),
        Layer("decoder", embed, call=_as_decoder, tied="embed"),
        Layer("outputs", partial(Outputs, shape), may_start_stage=False),
    ]


def _as_decoder(module: nn.Module, value: Tensor) -> Any:
    return module(value, as_decoder=True)
