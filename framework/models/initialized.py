"""Layers that draw their own initial weights: linear layers and embeddings of transformers,
convolutions of ResNets.

Under ZeRO-3 a module's weights are partitioned away when its constructor returns, so they are drawn
in the constructor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from framework.models.filled_rows import logits_of
from framework.models.sequence import first_position
from framework.models.split import VocabularyPart
from framework.models.tiled_loss import TiledLoss, tiled_loss

DEFAULT_STD = 0.02


class _Drawn(nn.Module):
    def __init__(
        self, *sizes: int, std: float = DEFAULT_STD, truncated: bool = False, **options: Any
    ) -> None:
        # torch's constructor calls `reset_parameters`, which needs both attributes.
        self.std = std
        self.truncated = truncated
        super().__init__(*sizes, **options)

    def reset_parameters(self) -> None:
        weight = self._parameters["weight"]
        bias = self._parameters.get("bias")
        assert weight is not None
        draw(weight, std=self.std, truncated=self.truncated)
        if bias is not None:
            nn.init.zeros_(bias)


class DrawnLinear(_Drawn, nn.Linear):
    """`nn.Linear` with weights from N(0, std^2), cut off at two standard deviations if `truncated`;
    bias zero.
    """


class DrawnEmbedding(_Drawn, nn.Embedding):
    """`nn.Embedding` with vectors from N(0, std^2), cut off at two standard deviations if
    `truncated`.
    """


class TokenEmbedding(DrawnEmbedding):
    """Embedding of tokens, and output layer with the same weight.

    Tokens (..., ) int64 to vectors (..., hidden). With `as_head`: vectors (..., hidden) to logits
    (..., vocabulary), or to a `TiledLoss`. A tuple (tokens, places) becomes (vectors, places). All
    are one forward, because ZeRO-3 gathers weights when a module is called, and only then.

    Attributes:
        vocabulary: this rank's part, where the ranks of a tensor group share the weight.
        head_bias: the bias that is added to logits in tiles: one tensor, or none.
    """

    vocabulary: VocabularyPart | None = None
    head_bias: Sequence[Tensor] = ()

    def forward(self, value: Any, *, as_head: bool = False) -> Any:
        if isinstance(value, tuple):
            return self.look_up(value[0]), value[1]
        if as_head:
            return self.logits(value)
        return self.look_up(value)

    def look_up(self, tokens: Tensor) -> Tensor:
        if self.vocabulary is None:
            return super().forward(tokens)
        return self.vocabulary.look_up(tokens, self.weight)

    def logits(self, hidden: Tensor) -> Tensor | TiledLoss:
        loss = tiled_loss(hidden, self.weight, *self.head_bias)
        if loss is not None:
            return loss
        if self.vocabulary is None:
            return logits_of(hidden, self.weight)
        return self.vocabulary.logits(hidden, self.weight)


def as_head(module: nn.Module, value: Tensor) -> Any:
    """Apply a tied `TokenEmbedding` as the output layer."""
    return module(value, as_head=True)


def split_heads(projected: Tensor, head_size: int) -> Tensor:
    """Reshape (batch, sequence, heads * head_size) to (batch, heads, sequence, head_size)."""
    return projected.view(*projected.shape[:2], -1, head_size).transpose(1, 2)


def positions_of(embedded: Tensor, positions: Tensor) -> Tensor:
    """Select the learned vectors of the positions of a sequence, or of this rank's part of it.

    Args:
        embedded: (batch, sequence, hidden), read for its length.
        positions: vectors of all positions, (max_positions, hidden).

    Returns:
        (sequence, hidden).

    Raises:
        ValueError: the sequence is too long.
    """
    first = first_position(embedded.shape[1])
    end = first + embedded.shape[1]
    if end > len(positions):
        raise ValueError(f"a sequence of {end} tokens; the model has {len(positions)} positions")
    return positions[first:end]


@torch.no_grad()
def draw(weight: Tensor, *, std: float, truncated: bool) -> None:
    """Fill with draws from N(0, std^2), cut off at two standard deviations if `truncated`.

    Truncated draws are made in float32 at least: the cut-off needs more digits than half precision
    has.
    """
    if not truncated:
        weight.normal_(std=std)
        return
    drawn = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight.copy_(nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std))


class HeConv2d(nn.Conv2d):
    """`nn.Conv2d` with He initialisation, fan-out mode (He et al. 2015, "Delving Deep into
    Rectifiers").

    Drawn by the constructor: `kaiming_normal_` on a weight that ZeRO-3 has partitioned only warns.
    """

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 2 / (out_channels * kernel area)); set the bias, if any, to
        zero.
        """
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)
