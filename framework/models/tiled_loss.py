"""Cross-entropy of an output layer tile by tile over positions: the logits of a long sequence are never whole.

A tile's gradients are made beside its loss, before its logits go (as Liger Kernel does; Hsu et al. 2024), so that what
is kept are the gradients of what the layer read and of its weight. The latter is summed in fp32 over the tiles.
torch's own `linear_cross_entropy` (2.15) sums loss and gradient in the weight's precision, and divides no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from framework.config.training import LossTile, positions_of_tile
from framework.errors import ConfigError
from framework.models.split import ColumnLinear, VocabularyPart


class TiledLoss(NamedTuple):
    """Output of a model in the place of its logits.

    Attributes:
        guesses: the token with the largest logit, int64 in the shape of the targets; None in training.
        nats: sum of the cross-entropies of all positions with a target, 0-d float32.
    """

    guesses: Tensor | None
    nats: Tensor

    def _refuse(self, *_: Any) -> NoReturn:
        reason, fix = "the model changes its logits after the output layer", "set training.loss_tile: 0"
        raise ConfigError.of("loss-not-tiled", reason, fix, "training.loss_tile")

    __truediv__ = __mul__ = __rmul__ = _refuse  # type: ignore[assignment]


@dataclass(frozen=True)
class Wanted:
    """Product of the output layers that is wanted meanwhile.

    Attributes:
        targets: tokens (...,) int64, below zero where a position has none.
        tile: `training.loss_tile`.
        vocabulary: this rank's part of the logits, where a tensor group shares them.
    """

    targets: Tensor
    tile: LossTile
    vocabulary: VocabularyPart | None = None

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Within this block. Not a context variable: the backward pass, which may run layers again, has threads."""
        global _wanted
        before, _wanted = _wanted, self
        try:
            yield
        finally:
            _wanted = before


_wanted: Wanted | None = None


def tiled_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> TiledLoss | None:
    """The loss of logits hidden @ weight.T + bias, where one is wanted and they are too many; None elsewhere.

    Args:
        hidden: (..., size), in the shape of the targets.
        weight: (tokens, size), of a divided vocabulary this rank's.
        bias: (tokens,).
    """
    if (wanted := _wanted) is None:
        return None
    positions = positions_of_tile(wanted.tile, wanted.targets.numel(), len(weight))
    if not positions:
        return None
    vocabulary = wanted.vocabulary or VocabularyPart(None, [len(weight)], joins=False)
    if vocabulary.part is not None:
        hidden = vocabulary.part.copy(hidden)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    has_guesses = not torch.is_grad_enabled()
    rows, targets = hidden.flatten(0, -2), wanted.targets.flatten()
    guesses, nats = _TiledLoss.apply(rows, weight, bias, targets, vocabulary, positions, has_guesses)
    return TiledLoss(guesses.view(wanted.targets.shape) if has_guesses else None, nats)


class _TiledLoss(torch.autograd.Function):
    """Gradients wait, unscaled, for that of the sum: nothing is saved of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        vocabulary: VocabularyPart,
        positions: int,
        has_guesses: bool,
    ) -> tuple[Tensor, Tensor]:
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        row_gradient = torch.empty_like(rows) if of_rows else None
        zeros = partial(torch.zeros, dtype=torch.float32, device=rows.device)
        weight_gradient = zeros(weight.shape) if of_weight else None
        bias_gradient = zeros(len(weight)) if of_bias else None
        total, guesses = zeros(()), targets.new_empty(len(targets) if has_guesses else 0)
        for start in range(0, len(rows), positions):
            tile = slice(start, start + positions)
            part, counts = rows[tile], targets[tile] >= 0
            logits = part @ weight.T
            if bias is not None:
                logits = logits.add_(bias) if logits.dtype == bias.dtype else logits + bias
            if has_guesses:
                guesses[tile] = vocabulary.guesses(logits)
            local, outside = vocabulary.own(targets[tile])
            shares, nats = vocabulary.shares(logits.float(), local, outside)
            del logits
            total += nats.masked_fill(~counts, 0.0).sum()
            if not (of_rows or of_weight or of_bias):
                continue
            shares.scatter_add_(-1, local.unsqueeze(-1), outside.unsqueeze(-1).float() - 1)
            shares.mul_(counts.unsqueeze(-1))
            if bias_gradient is not None:
                bias_gradient += shares.sum(0)
            shares = shares.to(rows.dtype)
            if row_gradient is not None:
                torch.mm(shares, weight, out=row_gradient[tile])
            if weight_gradient is not None and shares.dtype == torch.float32:
                weight_gradient.addmm_(shares.T, part)
            elif weight_gradient is not None:
                weight_gradient += shares.T @ part
            del shares  # or the next tile's logits would stand beside it
        ctx.gradients = row_gradient, weight_gradient, bias_gradient
        ctx.dtypes = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(guesses)
        ctx.set_materialize_grads(False)
        return guesses, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Any, gradient: Tensor) -> Any:
        found, ctx.gradients = ctx.gradients, None  # which are scaled in place
        if found is None:
            raise RuntimeError("a loss in tiles has one backward pass; set training.loss_tile: 0 for several")
        scale = gradient.view(1)  # of one dimension: a product with half precision is made in fp32
        scaled = (
            None if one is None else one.mul_(scale).to(dtype) for one, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None


class _Head:
    """An `nn.Linear` that gives the loss in the place of logits where that is wanted."""

    def forward(self, input: Tensor) -> Any:
        loss = tiled_loss(input, self.weight, self.bias)  # type: ignore[attr-defined]
        return super().forward(input) if loss is None else loss  # type: ignore[misc]


def output_head(model: Any) -> nn.Module | None:
    """Let the output layer of a model, as transformers name it, give losses; None where it is not one that can."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if hasattr(head, "head_bias"):
        return head
    if not isinstance(head, nn.Linear) or type(head).forward not in (nn.Linear.forward, ColumnLinear.forward):
        return None
    head.__class__ = type(type(head).__name__, (_Head, type(head)), {})
    return head
