"""Muon's matrices under a plan: products that make them orthogonal, bytes that are sent and held.

How they are divided and sent is that of `engine/muon_shares.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from math import prod
from typing import Final

from framework.config.groups import stepped_by_muon
from framework.config.optimizer import Muon
from framework.plan.operations import Shape

_ROUND_NUMBERS: Final = 2**24  # engine/muon_shares.py `ROUND_NUMBERS`
_SENT: Final = 2  # bytes of a number on its way: bf16


def muon_matrices(muon: Muon, weights: Mapping[str, Shape]) -> list[Shape]:
    """List the shapes of the matrices that Muon steps; a packed weight has one for each expert."""
    matrices: list[Shape] = []
    for name, shape in weights.items():
        if stepped_by_muon(name, shape, muon):
            matrices.extend(repeat(shape[-2:], prod(shape[:-2])))
    return matrices


def orthogonal_flops(muon: Muon, shape: Shape) -> float:
    """Return the operations that make one matrix orthogonal: in each iteration three products, of
    the matrix with itself, of the result with itself, and of that with the matrix.
    """
    rows = min(shape)
    columns = max(shape)
    return float(muon.ns_steps * (4 * rows**2 * columns + 2 * rows**3))


def flops_of_rank(muon: Muon, matrices: Sequence[Shape], *, stage: int, ranks: int) -> float:
    """Return the operations of the rank that does most: all of them at ZeRO 0, else an even share,
    and at least the largest matrix.
    """
    flops = [orthogonal_flops(muon, shape) for shape in matrices]
    if stage == 0:
        return sum(flops)
    return max(sum(flops) / ranks, max(flops, default=0.0))


def sent_numbers(matrices: Sequence[Shape], *, stage: int, ranks: int) -> float:
    """Return how many numbers all ranks together send to where they are computed; as many return.

    At stages 1 and 2 a border between two shares runs through one matrix each, and the smaller part
    of it is sent: a quarter of the matrix on average.
    """
    if stage == 0 or ranks == 1:
        return 0.0
    total = float(sum(map(prod, matrices)))
    if stage == 3:
        return total
    mean = total / max(len(matrices), 1)
    return min((ranks - 1) * mean / 4, total)


def orthogonal_bytes(shape: Shape) -> int:
    """Return the bytes that it takes to make a matrix orthogonal: in bf16 the matrix, its copy and
    the next one, and two of its products with itself.
    """
    return _SENT * (3 * prod(shape) + 2 * min(shape) ** 2)


def exchange_bytes(matrices: Sequence[Shape], *, stage: int, ranks: int) -> int:
    """Return the bytes at the fullest of an exchange, beside this rank's share in bf16.

    Of a round there are the pieces that are sent and those that come; of several rounds one is
    under way in each direction while another is computed.
    """
    if not matrices:
        return 0
    largest = max(matrices, key=prod)
    held = orthogonal_bytes(largest)
    if stage == 0 or ranks == 1:
        return held
    if stage < 3:
        return held + 2 * _SENT * prod(largest)
    share = max(sum(map(prod, matrices)) // ranks, prod(largest))
    in_round = min(share, max(prod(largest), _ROUND_NUMBERS))
    if in_round < share:
        return held + 6 * _SENT * in_round
    return held + 2 * _SENT * in_round
