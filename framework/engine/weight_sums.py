"""Sums of the bits of weights: they show which weight was written, and whether ranks hold the
same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor
from torch.nn import Parameter

_MOST_BLOCKS: Final = 2**11  # sums of a flat buffer, by which a weight is found


def bit_sum(flat: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, as an int32 that may overflow."""
    return _as_integers(flat.contiguous()).sum(dtype=torch.int32)


def block_sums(flat: Tensor) -> Tensor:
    """Return the sum of the bits in each block of a flat tensor, int32, at most `_MOST_BLOCKS` of
    equal size and one shorter.
    """
    integers = _as_integers(flat.detach())
    size = _block_size(integers.numel())
    num_full = integers.numel() // size
    end = num_full * size
    sums = integers[:end].view(num_full, size).sum(1, dtype=torch.int32)
    if end == integers.numel():
        return sums
    last = integers[end:].sum(dtype=torch.int32)
    return torch.cat((sums, last.view(1)))


def weights_in_blocks(
    members: Iterable[tuple[Parameter, int, int]], blocks: Sequence[int], flat: Tensor
) -> list[Parameter]:
    """List the weights that lie in some blocks of a flat tensor, those with most numbers in them
    first.

    Args:
        members: weight, number of its elements and its offset in `flat`.
        blocks: positions in the result of `block_sums`.
        flat: the tensor that was summed.
    """
    num_integers = _as_integers(flat).numel()
    # of a block, in elements of `flat`: an integer may hold two of them, or half of one
    size = _block_size(num_integers) * flat.numel() // max(num_integers, 1)
    starts = torch.tensor(blocks, dtype=torch.int64) * size
    overlaps = list[tuple[int, Parameter]]()
    for parameter, numel, offset in members:
        lengths = (starts + size).clamp(max=offset + numel) - starts.clamp(min=offset)
        overlap = int(lengths.clamp(min=0).sum())
        if overlap:
            overlaps.append((overlap, parameter))
    overlaps.sort(key=lambda pair: -pair[0])
    return [parameter for _, parameter in overlaps]


def differing_positions(sums: Tensor, process_group: Any) -> list[int]:
    """List the positions at which ranks have different sums. Collective; waits for the device."""
    # one reduction for the largest sum and the negated least: they differ where ranks do
    ends = torch.stack((sums, -sums))
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX, group=process_group)
    positions: list[int] = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    return positions


def _as_integers(flat: Tensor) -> Tensor:
    """View the bits of a tensor as integers: their sum is the same in any order, even where it
    overflows. Two numbers of 2 bytes are one integer where they can be.
    """
    size = flat.element_size()
    if size == 8 or (size == 2 and flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0):
        return flat.view(torch.int32)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])


def _block_size(count: int) -> int:
    return max(1, -(-count // _MOST_BLOCKS))
