"""Logits in half precision of a vocabulary that GPUs multiply slowly: the product's rows are filled
up, and the logits of the filled rows are cut off again.

The weight keeps its rows, and so checkpoints, exports and published names keep theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from framework.config.training import HALF_ROWS, fills_rows


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden (..., size) times weight (tokens, size): logits (..., tokens)."""
    if torch.compiler.is_compiling():  # inductor fills up by itself
        return linear(hidden, weight)
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    positions = hidden.numel() // hidden.shape[-1]
    if not is_filled(device, dtype, positions, len(weight)):
        return linear(hidden, weight)
    logits: Tensor = FilledProduct.apply(hidden.to(dtype), weight.to(dtype))
    return logits


def is_filled(device: str, dtype: torch.dtype, positions: int, tokens: int) -> bool:
    """Check whether the rows of a product are worth filling up."""
    return device == "cuda" and dtype.itemsize == 2 and fills_rows(tokens, positions)


class FilledProduct(torch.autograd.Function):
    """`logits_of` with rows of zeros up to a multiple of `HALF_ROWS`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        filled = _filled(weight)
        ctx.save_for_backward(hidden, filled)
        ctx.tokens = len(weight)
        return linear(hidden, filled)[..., : ctx.tokens]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        rows = hidden.reshape(-1, hidden.shape[-1])
        filled = gradient.new_empty(len(rows), len(weight))
        filled[:, : ctx.tokens] = gradient.reshape(-1, ctx.tokens)
        filled[:, ctx.tokens :] = 0
        hidden_gradient: Tensor | None = None
        weight_gradient: Tensor | None = None
        if ctx.needs_input_grad[0]:
            hidden_gradient = (filled @ weight).view_as(hidden)
        if ctx.needs_input_grad[1]:
            weight_gradient = (filled.T @ rows)[: ctx.tokens]
        return hidden_gradient, weight_gradient


def _filled(weight: Tensor) -> Tensor:
    tokens = len(weight)
    filled = weight.new_empty(tokens + -tokens % HALF_ROWS, weight.shape[1])
    filled[:tokens] = weight
    filled[tokens:] = 0
    return filled
