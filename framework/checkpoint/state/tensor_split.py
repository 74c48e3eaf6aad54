"""Division of a weight over the ranks of a tensor group, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """Division of one weight along one dimension.

    Attributes:
        dim: the dimension that is divided.
        sections: sizes along it of what the weight holds side by side, each divided by itself: one, or three where
            query, key and value are one matrix.
    """

    dim: int
    sections: tuple[int, ...]

    def bounds(self, rank: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end, in the whole, of a rank's share of every section; shares differ by one at most."""
        start = 0
        for section in self.sections:
            yield start + section * rank // size, start + section * (rank + 1) // size
            start += section

    def part(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's part of the whole weight, contiguous and of its own memory."""
        own = [whole.narrow(self.dim, begin, end - begin) for begin, end in self.bounds(rank, size)]
        return torch.cat(own, dim=self.dim).contiguous()

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight whose parts these are, in the order of ranks."""
        cut = [
            torch.split(part, [end - begin for begin, end in self.bounds(rank, len(parts))], dim=self.dim)
            for rank, part in enumerate(parts)
        ]
        return torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces], dim=self.dim)


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight before a tensor group (its attribute `split`) and ZeRO-3 took their parts."""
    shape, split = getattr(weight, "ds_shape", weight.shape), vars(weight).get("split")
    if split is None:
        return torch.Size(shape)
    return torch.Size((*shape[: split.dim], sum(split.sections), *shape[split.dim + 1 :]))
