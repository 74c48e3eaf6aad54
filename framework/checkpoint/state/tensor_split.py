"""Division of a weight over the ranks of a tensor group, and the way back: of tensors, and of their
numbers, seen as flat, for a reader that wants some of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Split:
    """Division of one weight along one dimension.

    Attributes:
        dim: the dimension that is divided, counted from the first.
        sections: sizes along it of what the weight holds side by side, each divided by itself: one,
            or three where query, key and value are one matrix.
    """

    dim: int
    sections: tuple[int, ...]

    def bounds(self, rank: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end, in the whole, of a rank's share of every section; shares differ by
        one at most.
        """
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
            torch.split(
                part, [end - begin for begin, end in self.bounds(rank, len(parts))], dim=self.dim
            )
            for rank, part in enumerate(parts)
        ]
        return torch.cat(
            [piece for pieces in zip(*cut, strict=True) for piece in pieces], dim=self.dim
        )

    def part_shape(self, whole: Sequence[int], rank: int, size: int) -> torch.Size:
        """Return the shape of a rank's part of a weight of this shape."""
        return self._with_width(whole, sum(end - begin for begin, end in self.bounds(rank, size)))

    def whole_shape(self, part: Sequence[int]) -> torch.Size:
        """Return the shape of the weight of which a part has this shape."""
        return self._with_width(part, sum(self.sections))

    def _with_width(self, shape: Sequence[int], width: int) -> torch.Size:
        return torch.Size((*shape[: self.dim], width, *shape[self.dim + 1 :]))

    def to_parts(
        self, shape: torch.Size, size: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield where numbers `start` to `stop` of the whole weight lie: rank, first number in its
        part, how many.
        """
        spans, rows = _spans(self, shape, size)
        for row, span, within, num in _follow([span.whole for span in spans], spans, start, stop):
            yield span.rank, row * rows[span.rank] + span.part + within, num

    def to_whole(
        self, shape: torch.Size, rank: int, size: int, start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        """Yield where numbers `start` to `stop` of a rank's part lie in the whole weight: first
        number, how many.
        """
        spans, rows = _spans(self, shape, size)
        own = [span for span in spans if span.rank == rank]
        width = sum(rows)
        for row, span, within, num in _follow([span.part for span in own], own, start, stop):
            yield row * width + span.whole + within, num


@dataclass(frozen=True)
class _Span:
    """A rank's share of a section, in a row.

    Attributes:
        whole: where it begins in the row of the whole weight.
        part: where it begins in the row of the rank's part.
    """

    rank: int
    whole: int
    part: int
    num: int


# asked for every row of a weight that is divided along another dimension than the first
@lru_cache(maxsize=64)
def _spans(split: Split, shape: torch.Size, size: int) -> tuple[list[_Span], list[int]]:
    """Return what lies side by side in a row of a weight (its numbers from the divided dimension
    on), and how many numbers each rank has of a row.
    """
    inner = shape[split.dim + 1 :].numel()
    rows = [0] * size
    spans = []
    for shares in zip(*(split.bounds(rank, size) for rank in range(size)), strict=True):
        for rank, (begin, end) in enumerate(shares):
            spans.append(_Span(rank, begin * inner, rows[rank], (end - begin) * inner))
            rows[rank] += spans[-1].num
    return spans, rows


def _follow(
    begins: Sequence[int], spans: Sequence[_Span], start: int, stop: int
) -> Iterator[tuple[int, _Span, int, int]]:
    """Yield the stretches of numbers `start` to `stop`: row, span, first number within the span,
    how many.
    """
    width = sum(span.num for span in spans)
    while start < stop:
        row, within = divmod(start, width)
        number = bisect_right(begins, within) - 1
        within -= begins[number]
        num = min(spans[number].num - within, stop - start)
        yield row, spans[number], within, num
        start += num


@dataclass(frozen=True)
class Division:
    """Place of a rank in its tensor group, and the splits of its weights, by their names in the
    plain module.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    rank: int = 0
    size: int = 1


def split_of(weight: torch.Tensor) -> Split | None:
    """Return how a tensor group shares a weight: its attribute `split`, where it has one; otherwise
    that is a method of torch's.
    """
    return vars(weight).get("split")


def splits_of(names: Mapping[torch.Tensor, str]) -> dict[str, Split]:
    """Return the splits of tensors by name, of those that have one."""
    found = {name: split_of(tensor) for tensor, name in names.items()}
    return {name: split for name, split in found.items() if split is not None}


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight before a tensor group (its attribute `split`) and ZeRO-3 took
    their parts.
    """
    shape = torch.Size(getattr(weight, "ds_shape", weight.shape))
    split = split_of(weight)
    if split is None:
        return shape
    return split.whole_shape(shape)
