"""Cross-entropy of an output layer tile by tile over positions: the logits of a long sequence are
never whole.

A tile's gradients are made beside its loss, before its logits go (Hsu et al. 2024, "Liger Kernel");
those of weights are summed in fp32. torch's own `linear_cross_entropy` (2.15) sums in the weight's
precision, and divides no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from framework.config.training import HALF_ROWS, LossTile, positions_of_tile
from framework.errors import ConfigError
from framework.models.split import ColumnLinear, VocabularyPart


class TiledLoss(NamedTuple):
    """Output of a model in the place of its logits.

    Attributes:
        guesses: the token with the largest logit, int64 in the shape of the targets; None in
            training.
        nats: sum of the cross-entropies of all positions with a target, 0-d float32.
    """

    guesses: Tensor | None
    nats: Tensor

    def __truediv__(self, _: Any) -> NoReturn:
        reason = "the model changes its logits after the output layer"
        fix = "set training.loss_tile: 0"
        raise ConfigError.of("loss-not-tiled", reason, fix, "training.loss_tile")


_wanted: tuple[Tensor, LossTile, VocabularyPart | None] | None = None


@contextmanager
def wanting_loss(
    targets: Tensor, tile: LossTile, vocabulary: VocabularyPart | None
) -> Iterator[None]:
    """Within this block output layers compute the loss of targets (...,) int64, negative where a
    position has none, in tiles as `training.loss_tile` says. Not a context variable: the backward
    pass, which may run layers again, has threads of its own.
    """
    global _wanted
    _wanted = targets, tile, vocabulary
    try:
        yield
    finally:
        _wanted = None


def tiled_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> TiledLoss | None:
    """The loss of logits hidden @ weight.T + bias, where one is wanted and they are too many; None
    elsewhere: hidden (..., size), weight (tokens, size), bias (tokens,), of a divided vocabulary
    this rank's.
    """
    targets, tile, vocabulary = _wanted or (None, 0, None)
    if targets is None:
        return None
    is_cast = torch.is_autocast_enabled(hidden.device.type)
    if is_cast:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    else:
        dtype = hidden.dtype
    positions = positions_of_tile(tile, targets.numel(), len(weight), is_half=dtype.itemsize == 2)
    if not positions:
        return None
    if vocabulary is None:
        vocabulary = VocabularyPart(None, [len(weight)], joins=False)
    elif vocabulary.part is not None:
        hidden = vocabulary.part.copy(hidden)
    has_guesses = not torch.is_grad_enabled()
    matrices = hidden.flatten(0, -2).to(dtype), weight.to(dtype)
    guesses, nats = _TiledLoss.apply(
        *matrices, bias, targets.flatten(), vocabulary, positions, has_guesses
    )
    return TiledLoss(guesses.view(targets.shape) if has_guesses else None, nats)


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
        needed = ctx.needs_input_grad[:3]
        size = len(weight)
        padding = -size % HALF_ROWS if rows.dtype.itemsize == 2 else 0
        if padding:
            weight = pad(weight, (0, 0, 0, padding))
            bias = None if bias is None else pad(bias, (0, padding))
        zeros = partial(torch.zeros, dtype=torch.float32, device=rows.device)
        if needed[0]:
            of_rows = torch.empty_like(rows)
        else:
            of_rows = None
        if needed[1]:
            of_weight = zeros(weight.shape)
        else:
            of_weight = None
        if needed[2]:
            of_bias = zeros(len(weight))
        else:
            of_bias = None
        total = zeros(())
        guesses = targets.new_empty(len(targets) if has_guesses else 0)
        for start in range(0, len(rows), positions):
            tile = slice(start, start + positions)
            part = rows[tile]
            counts = targets[tile] >= 0
            logits = part @ weight.T
            if bias is not None:
                logits = logits.float().add_(bias)
            if padding:
                logits[:, size:] = -torch.inf
            if has_guesses:
                guesses[tile] = vocabulary.guesses(logits)
            local, outside = vocabulary.own(targets[tile])
            is_half = logits.dtype == rows.dtype and rows.dtype.itemsize == 2
            is_fused = is_half and vocabulary.part is None
            if is_fused:
                shares, nats = _shares_of_half(logits, local)
                part = part * counts.unsqueeze(-1)
            else:
                exponentials, sums, nats = vocabulary.exponentials(logits, local, outside)
            # Not in place: compiled by torch 2.11, an output that was written in place has no
            # gradient.
            total = total + nats.masked_fill(~counts, 0.0).sum()
            if not any(needed):
                continue
            if not is_fused:
                factors = counts / sums
                local = local.unsqueeze(-1)
                of_target = (
                    exponentials.gather(-1, local).squeeze(-1) * factors
                    - (counts & ~outside).float()
                )
                if logits.dtype == rows.dtype:
                    shares = logits
                else:
                    shares = torch.empty_like(logits, dtype=rows.dtype)
                torch.mul(exponentials, factors.unsqueeze(-1), out=shares)
                shares.scatter_(-1, local, of_target.unsqueeze(-1).to(shares.dtype))
                del exponentials
            if of_bias is not None:
                of_bias += shares.sum(0, dtype=torch.float32)
            if of_rows is not None:
                torch.mm(shares, weight, out=of_rows[tile])
                if is_fused:
                    of_rows[tile] *= counts.unsqueeze(-1)
            if of_weight is not None and shares.dtype == torch.float32:
                of_weight.addmm_(shares.T, part)
            elif of_weight is not None:
                of_weight += shares.T @ part
            del shares, logits  # or the next tile's logits would stand beside them
        ctx.gradients = (
            of_rows,
            *(None if one is None else one[:size] for one in (of_weight, of_bias)),
        )
        ctx.dtypes = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(guesses)
        ctx.set_materialize_grads(False)
        return guesses, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Any, gradient: Tensor) -> Any:
        # which are scaled in place
        found = ctx.gradients
        ctx.gradients = None
        if found is None:
            raise RuntimeError(
                "a loss in tiles has one backward pass; set training.loss_tile: 0 for several"
            )
        scale = gradient.view(1)  # of one dimension: a product with half precision is made in fp32
        scaled = (
            None if one is None else one.mul_(scale).to(dtype)
            for one, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None


def _shares_of_half(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Compute probabilities, less one at the target, and the cross-entropy, in two passes.

    Args:
        logits: (positions, tokens) in half precision, of all tokens; overwritten.
        local: targets (positions,) int64.

    Returns:
        The gradient of the cross-entropy of each position, (positions, tokens) in the memory of the
        logits, and the cross-entropy (positions,) float32.
    """
    logs = torch.log_softmax(logits, -1, dtype=torch.float32)
    places = local.unsqueeze(-1)
    of_target = logs.gather(-1, places)
    shares = torch.exp(logs, out=logits)
    shares.scatter_(-1, places, (of_target.exp() - 1).to(shares.dtype))
    return shares, -of_target.squeeze(-1)


class _Head:
    """An `nn.Linear` that gives the loss in the place of logits where that is wanted."""

    def forward(self, input: Tensor) -> Any:
        loss = tiled_loss(input, self.weight, self.bias)  # type: ignore[attr-defined]
        return super().forward(input) if loss is None else loss  # type: ignore[misc]


def output_head(model: Any) -> nn.Module | None:
    """Let the output layer of a model, as transformers name it, give losses; None where it is not
    one that can.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if hasattr(head, "head_bias"):
        return head
    if not isinstance(head, nn.Linear) or type(head).forward not in (
        nn.Linear.forward,
        ColumnLinear.forward,
    ):
        return None
    head.__class__ = type(type(head).__name__, (_Head, type(head)), {})
    return head
