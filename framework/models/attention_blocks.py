"""Attention of some queries over some of the keys that they see, with the logarithm of its
softmax's sum, by which results over several sets of keys are added; and its backward pass, which
takes the sum over all of them.

On CPUs, and on GPUs in half precision without a mask, torch's kernels of flash attention compute
it; else it is computed step by step, some queries at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

_HALF: Final = (torch.float16, torch.bfloat16)
_QUERIES: Final = 1024  # at once where scores are written down
# Flash attention's limits on GPUs: the largest head, and the number that its size is a multiple of.
_LARGEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8


def block_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Any]:
    """Compute attention over a set of keys.

    Args:
        query: (rows, heads, queries, head size).
        key: (rows, heads, keys, head size).
        value: (rows, heads, keys, value size).
        mask: bool, True where a query sees a key; broadcastable to (rows, heads, queries, keys).
        is_causal: query i sees keys 0 to i; there are as many queries as keys then.
        dropout: share of the weights that are set to zero.
        scale: factor of the scores.

    Returns:
        The weighted values, (rows, heads, queries, size of a value); the logarithms of the sums of
        exp(score), (rows, heads, queries), -inf for queries that see no key; and what the backward
        pass needs to know of the dropout.
    """
    kernel = _kernel_of(query, value, mask, dropout)
    if kernel == "cpu":
        mixed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=_as_bias(mask, query), scale=scale
        )
        if mask is not None:  # the kernel's sum of a query that sees nothing is 0
            sums = sums.masked_fill(~mask.any(-1), -torch.inf)
        return mixed, sums, None
    if kernel == "cuda":
        mixed, sums, _, _, _, _, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout, is_causal, False, scale=scale
            )
        )
        return mixed, sums[..., : query.shape[2]], (seed, offset)
    return _steps_forward(query, key, value, mask, is_causal, dropout, scale)


def block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    state: Any,
    *,
    is_causal: bool,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values of a set of keys.

    Args:
        gradient: of `mixed`.
        query, key, value, mask, is_causal, dropout, scale: as in `block_forward`.
        mixed: weighted values over all keys, not over this set alone.
        sums: logarithms of the sums over all keys.
        state: the third result of `block_forward`.
    """
    kernel = _kernel_of(query, value, mask, dropout)
    made: tuple[Tensor, Tensor, Tensor]
    if kernel == "cpu":
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            query,
            key,
            value,
            mixed,
            sums.contiguous(),
            0.0,
            is_causal,
            attn_mask=_as_bias(mask, query),
            scale=scale,
        )
        return made
    if kernel == "cuda":
        made = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            mixed,
            sums.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            dropout,
            is_causal,
            *state,
            scale=scale,
        )
        return made
    return _steps_backward(
        gradient, query, key, value, mixed, sums, mask, state, is_causal, dropout, scale
    )


def _kernel_of(query: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> str:
    """Return which kernel computes attention; empty: none does."""
    size = query.shape[-1]
    if size != value.shape[-1]:
        return ""
    if query.device.type == "cpu" and not dropout:
        return "cpu"
    is_size_of_kernel = size <= _LARGEST_HEAD and size % _HEAD_MULTIPLE == 0
    if query.device.type == "cuda" and query.dtype in _HALF and mask is None and is_size_of_kernel:
        return "cuda"
    return ""


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return bias.masked_fill_(~mask, -torch.inf)


def _tiles(
    query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield some queries after the other, with their scores (rows, heads, queries, keys) in fp32 or
    wider; -inf where a key is not seen.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.to(wide).transpose(-2, -1)
    for first in range(0, query.shape[2], _QUERIES):
        part = slice(first, first + _QUERIES)
        scores = query[:, :, part].to(wide) @ keys * scale
        if is_causal:
            places = torch.arange(query.shape[2], device=query.device)[part]
            others = torch.arange(key.shape[2], device=query.device)
            scores = scores.masked_fill(others > places[:, None], -torch.inf)
        if mask is not None:
            own = mask
            if mask.shape[-2] > 1:
                own = mask[..., part, :]
            scores = scores.masked_fill(~own, -torch.inf)
        yield part, scores


def _steps_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Any]:
    mixed: list[Tensor] = []
    sums: list[Tensor] = []
    kept: list[Tensor] = []
    for _, scores in _tiles(query, key, mask, is_causal=is_causal, scale=scale):
        sum_of_tile = scores.logsumexp(-1)
        safe = sum_of_tile.masked_fill(sum_of_tile == -torch.inf, 0.0)
        weights = (scores - safe.unsqueeze(-1)).exp()
        if dropout:
            kept.append(torch.rand_like(weights) >= dropout)
            weights = weights * kept[-1] / (1 - dropout)
        mixed.append(weights @ value.to(weights.dtype))
        sums.append(sum_of_tile)
    return torch.cat(mixed, 2), torch.cat(sums, 2), kept


def _steps_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    kept: Any,
    is_causal: bool,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = sums.dtype
    query_gradients: list[Tensor] = []
    key_gradient = torch.zeros_like(key, dtype=wide)
    value_gradient = torch.zeros_like(value, dtype=wide)
    tiles = _tiles(query, key, mask, is_causal=is_causal, scale=scale)
    for number, (part, scores) in enumerate(tiles):
        weights = (scores - sums[:, :, part].unsqueeze(-1)).exp()
        upper = gradient[:, :, part].to(wide)
        weight_gradient = upper @ value.to(wide).transpose(-2, -1)
        dropped = weights
        if dropout:
            share = kept[number] / (1 - dropout)
            dropped = weights * share
            weight_gradient = weight_gradient * share
        value_gradient += dropped.transpose(-2, -1) @ upper
        # Of a softmax: weights times the gradient without its mean under the weights, which is the
        # same over all sets of keys.
        mean = (upper * mixed[:, :, part].to(wide)).sum(-1, keepdim=True)
        score_gradient = weights * (weight_gradient - mean) * scale
        query_gradients.append(score_gradient @ key.to(wide))
        key_gradient += score_gradient.transpose(-2, -1) @ query[:, :, part].to(wide)
    return torch.cat(query_gradients, 2), key_gradient, value_gradient
