"""Cross-entropy of an output layer in tiles of positions, so that the logits of all positions never
exist at once.

A tile's gradients are computed with its loss, before its logits are freed (Hsu et al. 2024, "Liger
Kernel"); the gradients of weights are summed in fp32. torch's own `linear_cross_entropy` (2.15)
sums in the weight's precision, and divides no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from framework.config.training import HALF_ROWS, LossTile, positions_of_tile
from framework.errors import ConfigError
from framework.models.layers import keeping_nothing
from framework.models.split import ColumnLinear, VocabularyPart


class TiledLoss(NamedTuple):
    """Output of a model in place of its logits.

    Attributes:
        guesses: the token with the largest logit, int64 in the shape of the targets; None in
            training.
        nats: sum of the cross-entropies of all positions with a target, 0-d float32.
    """

    guesses: Tensor | None
    nats: Tensor

    def __truediv__(self, _: Any) -> NoReturn:
        """Refuse what a model does first to cap its logits: it divides them.

        Raises:
            ConfigError: kind ``loss-not-tiled``.
        """
        reason = "the model changes its logits after the output layer"
        fix = "set training.loss_tile: 0"
        raise ConfigError.of("loss-not-tiled", reason, fix, "training.loss_tile")


class TileKernels:
    """A tile's loss and gradients in half precision as one compiled function, and its weight's
    gradient added in one pass.

    The logits are read twice, by a sum and by their gradient, and never written in fp32; computed
    as written they are written and read twice as often (32,768 positions of 50,257 tokens in bf16
    on an H200: 21.8 ms in place of 31.7).

    Attributes:
        is_used: whether a tile was computed with them.
    """

    def __init__(self, backend: str) -> None:
        self.is_used = False
        self._gradient = torch.compile(_tile_gradient, backend=backend)

    def gradient(
        self, logits: Tensor, bias: Tensor | None, local: Tensor, counts: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Compute what `_tile_gradient` does."""
        self.is_used = True
        return self._gradient(logits, bias, local, counts, num_tokens)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ right, in half precision, to a sum in fp32, without rounding it before."""
        if total.is_cuda:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:  # no kernel of processors has two types
            total.addmm_(left.float(), right.float())


_kernels: TileKernels | None = None
_DEVICES_WITH_KERNELS: Final = {"cuda"}


def use_kernels(kernels: TileKernels | None) -> None:
    """Compute tiles in half precision on CUDA devices with these kernels from now on; None: as
    written.
    """
    global _kernels
    _kernels = kernels


def _kernels_for(rows: Tensor, vocabulary: VocabularyPart) -> TileKernels | None:
    """Return the kernels for tiles of `rows`, or None where they are computed as written."""
    # Inside of a compiled model the tiles are a part of its graph.
    if _kernels is None or torch.compiler.is_compiling():
        return None
    is_fit = rows.dtype.itemsize == 2 and rows.device.type in _DEVICES_WITH_KERNELS
    if not is_fit or vocabulary.part is not None:
        return None
    return _kernels


_wanted: tuple[Tensor, LossTile, VocabularyPart | None] | None = None


@contextmanager
def wanting_loss(
    targets: Tensor, tile: LossTile, vocabulary: VocabularyPart | None
) -> Iterator[None]:
    """Let output layers compute the loss within the block, in tiles.

    It is no context variable: the backward pass, which may run layers again, has threads of its
    own.

    Args:
        targets: (...,) int64, negative where a position has no target.
        tile: `training.loss_tile`.
        vocabulary: this rank's part, where the vocabulary is divided.
    """
    global _wanted
    _wanted = (targets, tile, vocabulary)
    try:
        yield
    finally:
        _wanted = None


def tiled_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> TiledLoss | None:
    """Compute the loss of the logits hidden @ weight.T + bias, tile by tile.

    Args:
        hidden: (..., size).
        weight: (tokens, size), this rank's tokens of a divided vocabulary.
        bias: (tokens,).

    Returns:
        None outside `wanting_loss`, and where the logits are few enough to be computed at once.
    """
    if _wanted is None:
        return None
    targets, tile, vocabulary = _wanted
    if torch.is_autocast_enabled(hidden.device.type):
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
    rows = hidden.flatten(0, -2).to(dtype)
    with keeping_nothing():
        guesses, nats = _SumOfTiles.apply(
            rows, weight.to(dtype), bias, targets.flatten(), vocabulary, positions, has_guesses
        )
    if has_guesses:
        return TiledLoss(guesses.view(targets.shape), nats)
    return TiledLoss(None, nats)


class _SumOfTiles(torch.autograd.Function):
    """Sum of the cross-entropies of all positions, with their guesses.

    The forward pass computes the gradients for a gradient 1 of the sum, and the backward pass
    scales them. No other tensor is kept between the two.
    """

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
        """Compute guesses and the sum of the cross-entropies, tile by tile.

        Args:
            ctx: keeps the gradients for `backward`.
            rows: (all positions, size).
            weight: (tokens, size), in the type of `rows`.
            bias: (tokens,).
            targets: (all positions,) int64, negative where a position has no target.
            vocabulary: the part that `weight` has.
            positions: of a tile.
            has_guesses: whether guesses are computed; otherwise they are empty.
        """
        num_tokens = len(weight)
        dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        if rows.dtype.itemsize == 2:
            weight, bias = _fill_rows(weight, bias)
        needs = ctx.needs_input_grad[:3]
        needs_gradients = any(needs)
        gradients = _empty_gradients(rows, weight, needs)
        rows_gradient, weight_gradient, bias_gradient = gradients
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        guesses = targets.new_empty(len(targets) if has_guesses else 0)
        kernels = None if has_guesses else _kernels_for(rows, vocabulary)
        is_fused = kernels is None and _is_fused(rows, bias, vocabulary)
        add = partial(_add_gradients, gradients, weight, kernels)
        logits_gradient: Tensor | None
        for start in range(0, len(rows), positions):
            tile = slice(start, start + positions)
            tile_rows = rows[tile]
            tile_targets = targets[tile]
            has_target = tile_targets >= 0
            logits = tile_rows @ weight.T
            if kernels is None:
                logits = _complete_logits(logits, bias, num_tokens)
            if has_guesses:
                guesses[tile] = vocabulary.guesses(logits)
            if kernels is not None:
                logits_gradient, nats = kernels.gradient(
                    logits, bias, tile_targets.clamp(min=0), has_target, num_tokens
                )
            elif is_fused:
                local, _ = vocabulary.own(tile_targets)
                logits_gradient, nats = _half_precision_gradient(logits, local)
                tile_rows = tile_rows * has_target.unsqueeze(-1)
            else:
                logits_gradient, nats = _gradient_as_written(
                    logits, tile_targets, vocabulary, dtype=rows.dtype, is_wanted=needs_gradients
                )
            del logits
            # Not in place: compiled by torch 2.11, an output that was written in place has no
            # gradient.
            total = total + nats.masked_fill(~has_target, 0.0).sum()
            if logits_gradient is not None:
                add(tile, logits_gradient, tile_rows)
            if is_fused and rows_gradient is not None:
                rows_gradient[tile] *= has_target.unsqueeze(-1)
            del logits_gradient  # before the next tile's logits are computed
        if weight_gradient is not None:
            weight_gradient = weight_gradient[:num_tokens]
        if bias_gradient is not None:
            bias_gradient = bias_gradient[:num_tokens]
        ctx.gradients = (rows_gradient, weight_gradient, bias_gradient)
        ctx.dtypes = dtypes
        ctx.mark_non_differentiable(guesses)
        ctx.set_materialize_grads(False)
        return guesses, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Any, gradient: Tensor) -> Any:
        gradients = ctx.gradients
        ctx.gradients = None  # they are scaled in place, and so right once
        if gradients is None:
            raise RuntimeError(
                "a loss in tiles has one backward pass; set training.loss_tile: 0 for several"
            )
        scale = gradient.view(1)  # of one dimension: a product with half precision is made in fp32
        scaled: list[Tensor | None] = []
        for input_gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            if input_gradient is None:
                scaled.append(None)
            else:
                scaled.append(input_gradient.mul_(scale).to(dtype))
        rows_gradient, weight_gradient, bias_gradient = scaled
        return rows_gradient, weight_gradient, bias_gradient, None, None, None, None


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _fill_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias with rows of zeros up to a multiple of HALF_ROWS."""
    padding = -len(weight) % HALF_ROWS
    if not padding:
        return weight, bias
    if bias is not None:
        bias = pad(bias, (0, padding))
    return pad(weight, (0, 0, 0, padding)), bias


def _complete_logits(logits: Tensor, bias: Tensor | None, num_tokens: int) -> Tensor:
    """Return logits (positions, tokens) with the bias added, in fp32 then, and -inf for rows that
    fill up the weight.
    """
    if bias is not None:
        logits = logits.float().add_(bias)
    if num_tokens < logits.shape[1]:
        logits[:, num_tokens:] = -torch.inf
    return logits


def _is_fused(rows: Tensor, bias: Tensor | None, vocabulary: VocabularyPart) -> bool:
    """Check whether `_half_precision_gradient` computes the tiles: on GPUs only, as on processors
    torch would first make a copy of the logits in fp32.
    """
    has_half_logits = rows.dtype.itemsize == 2 and bias is None
    return has_half_logits and vocabulary.part is None and rows.is_cuda


def _gradient_as_written(
    logits: Tensor,
    targets: Tensor,
    vocabulary: VocabularyPart,
    *,
    dtype: torch.dtype,
    is_wanted: bool,
) -> tuple[Tensor | None, Tensor]:
    """Compute the gradient of a tile's logits in `dtype`, None unless `is_wanted`, and the
    cross-entropy.

    Args:
        logits: (positions, tokens); their memory may take the gradient.
        targets: (positions,) int64, negative where a position has no target.
        vocabulary: the part that the logits are of.
        dtype: of the gradient.
        is_wanted: whether a gradient is computed.
    """
    local, outside = vocabulary.own(targets)
    exponentials, sums, nats = vocabulary.exponentials(logits, local, outside)
    if not is_wanted:
        return None, nats
    gradient = logits
    if logits.dtype != dtype:
        gradient = torch.empty_like(logits, dtype=dtype)
    has_target = targets >= 0
    _write_gradient(gradient, exponentials, has_target / sums, local, has_target & ~outside)
    return gradient, nats


def _empty_gradients(rows: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> _Gradients:
    """Return memory for the gradients of rows, weight and bias, the sums at zero; None where one is
    not needed.
    """
    zeros = partial(torch.zeros, dtype=torch.float32, device=rows.device)
    needs_rows, needs_weight, needs_bias = needs
    rows_gradient: Tensor | None = None
    weight_gradient: Tensor | None = None
    bias_gradient: Tensor | None = None
    if needs_rows:
        rows_gradient = torch.empty_like(rows)
    if needs_weight:
        weight_gradient = zeros(weight.shape)
    if needs_bias:
        bias_gradient = zeros(len(weight))
    return rows_gradient, weight_gradient, bias_gradient


def _add_gradients(
    gradients: _Gradients,
    weight: Tensor,
    kernels: TileKernels | None,
    tile: slice,
    logits_gradient: Tensor,
    tile_rows: Tensor,
) -> None:
    """Add what a tile gives to the gradients of all rows, of the weight and of the bias.

    Args:
        gradients: (all positions, size), (tokens, size) and (tokens,); None where it is not needed.
        weight: (tokens, size).
        kernels: by which the weight's gradient is added; None: as written.
        tile: the positions.
        logits_gradient: (positions of the tile, tokens).
        tile_rows: (positions of the tile, size).
    """
    rows_gradient, weight_gradient, bias_gradient = gradients
    if bias_gradient is not None:
        bias_gradient += logits_gradient.sum(0, dtype=torch.float32)
    if rows_gradient is not None:
        torch.mm(logits_gradient, weight, out=rows_gradient[tile])
    if weight_gradient is None:
        return
    if logits_gradient.dtype == torch.float32:
        weight_gradient.addmm_(logits_gradient.T, tile_rows)
    elif kernels is not None:
        kernels.add_product(weight_gradient, logits_gradient.T, tile_rows)
    else:
        weight_gradient += logits_gradient.T @ tile_rows


def _write_gradient(
    logits_gradient: Tensor,
    exponentials: Tensor,
    factors: Tensor,
    local: Tensor,
    is_local: Tensor,
) -> None:
    """Write the gradient of a tile's logits: the probabilities, less one at the target.

    Args:
        logits_gradient: (positions, tokens), overwritten; its memory may be that of `exponentials`.
        exponentials: numerators of the probabilities (positions, tokens).
        factors: their factor (positions,): 1 / denominator, 0 without a target.
        local: targets (positions,) int64, as rows of this rank's weight.
        is_local: whether the position has a target, and this rank has its row (positions,).
    """
    places = local.unsqueeze(-1)
    at_target = exponentials.gather(-1, places).squeeze(-1) * factors - is_local.float()
    torch.mul(exponentials, factors.unsqueeze(-1), out=logits_gradient)
    logits_gradient.scatter_(-1, places, at_target.unsqueeze(-1).to(logits_gradient.dtype))


def _half_precision_gradient(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Compute probabilities, less one at the target, and the cross-entropy, in two passes.

    Args:
        logits: (positions, tokens) in half precision, of all tokens; overwritten.
        local: targets (positions,) int64.

    Returns:
        The gradient of the cross-entropy of each position, (positions, tokens) in the memory of the
        logits, and the cross-entropy (positions,) float32.
    """
    log_probabilities = torch.log_softmax(logits, -1, dtype=torch.float32)
    places = local.unsqueeze(-1)
    at_target = log_probabilities.gather(-1, places)
    gradient = torch.exp(log_probabilities, out=logits)
    gradient.scatter_(-1, places, (at_target.exp() - 1).to(gradient.dtype))
    return gradient, -at_target.squeeze(-1)


def _tile_gradient(
    logits: Tensor, bias: Tensor | None, local: Tensor, counts: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of a tile's logits, and the cross-entropy, to be compiled: as written it
    would make five tensors of the logits' size in fp32.

    Args:
        logits: (positions, tokens and rows that fill them up) in half precision, without bias.
        bias: (the same number,), or None.
        local: targets (positions,) int64, any token for a position without one.
        counts: whether a position has a target (positions,).
        num_tokens: after them are filled up rows.

    Returns:
        The gradient, 0 without a target, in shape and type of the logits, and the cross-entropy
        (positions,) float32, 0 without a target.
    """
    scores = logits.float()
    if bias is not None:
        scores = scores + bias
    columns = torch.arange(logits.shape[1], device=logits.device)
    if num_tokens < logits.shape[1]:
        scores = scores.masked_fill(columns >= num_tokens, -torch.inf)
    places = local.unsqueeze(-1)
    shifted = scores - scores.amax(-1, keepdim=True)
    exponentials = shifted.exp()
    sums = exponentials.sum(-1, keepdim=True)
    nats = (sums.log() - shifted.gather(-1, places)).squeeze(-1).masked_fill(~counts, 0.0)
    gradient = exponentials / sums - (columns == places).float()
    return (gradient * counts.unsqueeze(-1)).to(logits.dtype), nats


class _Head:
    """An `nn.Linear` that returns the loss in place of logits within `wanting_loss`."""

    def forward(self, input: Tensor) -> Any:
        loss = tiled_loss(input, self.weight, self.bias)  # type: ignore[attr-defined]
        if loss is not None:
            return loss
        return super().forward(input)  # type: ignore[misc]


def output_head(model: Any) -> nn.Module | None:
    """Let the output layer of a model return losses, by another class with the same name, and
    return the layer.

    Returns:
        The layer that `get_output_embeddings` (transformers' name) finds, or None where there is no
        such layer or it is not an `nn.Linear`.
    """
    get_output_layer = getattr(model, "get_output_embeddings", None)
    if not callable(get_output_layer):
        return None
    head: nn.Module | None = get_output_layer()
    adds_bias_itself = hasattr(head, "head_bias")
    if adds_bias_itself:
        return head
    if not isinstance(head, nn.Linear):
        return None
    if type(head).forward not in (nn.Linear.forward, ColumnLinear.forward):
        return None
    head.__class__ = type(type(head).__name__, (_Head, type(head)), {})
    return head
