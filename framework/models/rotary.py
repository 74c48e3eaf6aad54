"""Rotary positions (Su et al. 2021, "RoFormer"), in the half-split order of Llama's released weights."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(*heads: Tensor, theta: float) -> tuple[Tensor, ...]:
    """Turn the pair (i, i + d/2) of the vector at position p by the angle p * theta^(-2i/d).

    The angles are computed anew in float32 (float64 for such input) and never kept in a buffer: ZeRO-3's constructor
    patch and half-precision casts would round them, and a checkpoint would hold what is no weight. Queries and keys,
    turned together, share them.

    Args:
        heads: queries or keys (batch, heads, sequence, d) of one length, d and dtype, d even.
        theta: base of the wavelengths.

    Returns:
        The same shapes and dtype.
    """
    some = heads[0]
    dtype, width = torch.promote_types(some.dtype, torch.float32), some.shape[-1]
    pairs = torch.arange(0, width, 2, device=some.device).to(dtype)
    positions = torch.arange(some.shape[-2], device=some.device).to(dtype)
    angles = torch.outer(positions, theta ** (-pairs / width))
    cos, sin = angles.cos(), angles.sin()
    return tuple(_turned(one.to(dtype), cos, sin).to(one.dtype) for one in heads)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
