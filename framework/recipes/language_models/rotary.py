"""Rotary positions (Su et al. 2021, "RoFormer"), in the half-split order of Llama's released
weights: the pair (i, i + d/2) of the vector at position p is turned by the angle
p * theta^(-2i/d).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.models.sequence import first_position


class _Made(NamedTuple):
    """A table, and what it was made for: positions of their own, and all else that it follows
    from.
    """

    places: Tensor | None
    request: tuple[Any, ...]
    turns: Tensor


# The last table. Blocks of one model ask for the same one, one after the other, and so do further
# passes over sequences of the same length: its numbers follow from the request alone.
_made: _Made | None = None


def turns_for(
    hidden: Tensor, *, head_size: int, theta: float, places: Tensor | None = None
) -> Tensor:
    """Return the cosines and sines of the angles at the positions of a batch, made at the first
    call of a forward pass and kept for all others.

    It is no buffer of a module: ZeRO-3's constructor patch and half-precision casts would round the
    angles, and a checkpoint would hold a tensor that is no weight.

    Args:
        hidden: what the blocks get, (batch, sequence, hidden); read for its length, type and
            device.
        head_size: d, even.
        theta: base of the angles.
        places: positions (batch, sequence) int64; None: the order in the sequence.

    Returns:
        (2, batch or 1, 1, sequence, d/2) in float32, or float64 for such vectors.
    """
    global _made
    length = hidden.shape[1]
    first = first_position(length)
    # A graph makes the table itself, once: it must hold no tensor of an earlier pass.
    if torch.compiler.is_compiling() or type(hidden) is not Tensor:
        return _make_turns(hidden, head_size, theta, first, places)
    request = (
        length,
        first,
        head_size,
        theta,
        hidden.dtype,
        hidden.device,
        torch.is_inference_mode_enabled(),
        _version(places),
    )
    made = _made
    if made is not None and made.places is places and made.request == request:
        return made.turns
    turns = _make_turns(hidden, head_size, theta, first, places)
    if type(turns) is Tensor:  # and no stand-in of a trace
        _made = _Made(places, request, turns)
    return turns


def _version(places: Tensor | None) -> int:
    """Return a number that changes with the numbers of a tensor; tensors made for inference have
    none.
    """
    if places is None or places.is_inference():
        return 0
    return places._version


def _make_turns(
    hidden: Tensor, head_size: int, theta: float, first: int, places: Tensor | None
) -> Tensor:
    device = hidden.device
    angle_dtype = torch.promote_types(hidden.dtype, torch.float32)
    pairs = torch.arange(0, head_size, 2, device=device).to(angle_dtype)
    if places is None:
        places = torch.arange(first, first + hidden.shape[1], device=device)[None]
    angles = places.to(angle_dtype)[:, None, :, None] * theta ** (-pairs / head_size)
    return torch.stack((angles.cos(), angles.sin()))


def turn(vectors: Tensor, turns: Tensor) -> Tensor:
    """Turn queries or keys (batch, heads, sequence, d) by the angles of their positions
    (`turns_for`).

    Products and sums are made in the type of the table. Returns the same shape and type.
    """
    if torch.compiler.is_compiling():  # a graph joins these operations itself
        return _turned_in_steps(vectors, turns)
    turned: Tensor = _Turn.apply(vectors, turns)
    return turned


def _turned_in_steps(vectors: Tensor, turns: Tensor) -> Tensor:
    """Compute what `turn` does, from operations that autograd knows."""
    cos, sin = turns
    first, second = vectors.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(vectors.dtype)


class _Turn(torch.autograd.Function):
    """`turn` in four kernels. None writes a copy of the vectors in the table's type.

    The result lies in memory as the vectors do, so that attention's output is in rows.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        return _turned(vectors, turns, sign=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (turns,) = ctx.saved_tensors
        return _turned(gradient, turns, sign=-1), None


def _turned(vectors: Tensor, turns: Tensor, *, sign: int) -> Tensor:
    """Turn vectors by their angles, or back: `sign` 1 or -1."""
    cos, sin = turns
    turned = torch.empty_like(vectors)
    first, second = vectors.chunk(2, dim=-1)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.addcmul(first * cos, second, sin, value=-sign, out=turned_first)
    torch.addcmul(second * cos, first, sin, value=sign, out=turned_second)
    return turned
