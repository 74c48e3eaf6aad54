"""Division of a weight over the ranks of a tensor or expert group, and its reversal: of tensors,
and of ranges of their numbers, seen as flat.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from framework.checkpoint.state.weight_parts import expert_part_of, split_of


@dataclass(frozen=True)
class Split:
    """Division of one weight along one dimension.

    Attributes:
        dim: the dimension that is divided, counted from the first.
        sections: sizes along it of the parts of the weight that lie side by side, each divided by
            itself: one, or three if query, key and value are one matrix.
    """

    dim: int
    sections: tuple[int, ...]

    def bounds(self, rank: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end, in the whole weight, of a rank's share of every section; shares
        differ by one at most.
        """
        start = 0
        for section in self.sections:
            yield start + section * rank // size, start + section * (rank + 1) // size
            start += section

    def part(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's part of the whole weight, contiguous and of its own memory."""
        shares = []
        for begin, end in self.bounds(rank, size):
            shares.append(whole.narrow(self.dim, begin, end - begin))
        return torch.cat(shares, dim=self.dim).contiguous()

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the parts of a weight, in the order of ranks."""
        shares_of_ranks = []
        for rank, part in enumerate(parts):
            widths = [end - begin for begin, end in self.bounds(rank, len(parts))]
            shares_of_ranks.append(torch.split(part, widths, dim=self.dim))
        shares: list[torch.Tensor] = []
        for shares_of_section in zip(*shares_of_ranks, strict=True):
            shares += shares_of_section
        return torch.cat(shares, dim=self.dim)

    def part_shape(self, whole: Sequence[int], rank: int, size: int) -> torch.Size:
        """Return the shape of a rank's part of a weight of this shape."""
        width = sum(end - begin for begin, end in self.bounds(rank, size))
        return self._with_width(whole, width)

    def whole_shape(self, part: Sequence[int]) -> torch.Size:
        """Return the shape of a whole weight that has a part of this shape."""
        return self._with_width(part, sum(self.sections))

    def _with_width(self, shape: Sequence[int], width: int) -> torch.Size:
        return torch.Size((*shape[: self.dim], width, *shape[self.dim + 1 :]))

    def to_parts(
        self, shape: torch.Size, size: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield where numbers `start` to `stop` of the whole weight lie: rank, first number in its
        part, how many.
        """
        spans, row_lengths = _spans(self, shape, size)
        for row, span, within, num in _follow([span.whole for span in spans], spans, start, stop):
            yield span.rank, row * row_lengths[span.rank] + span.part + within, num

    def to_whole(
        self, shape: torch.Size, rank: int, size: int, start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        """Yield where numbers `start` to `stop` of a rank's part lie in the whole weight: first
        number, how many.
        """
        spans, row_lengths = _spans(self, shape, size)
        rank_spans = []
        begins = []
        for span in spans:
            if span.rank == rank:
                rank_spans.append(span)
                begins.append(span.part)
        width = sum(row_lengths)
        for row, span, within, num in _follow(begins, rank_spans, start, stop):
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


# Called for every row of a weight that is divided along another dimension than the first.
@lru_cache(maxsize=64)
def _spans(split: Split, shape: torch.Size, size: int) -> tuple[list[_Span], list[int]]:
    """Return the spans that lie side by side in a row of a weight (its numbers from the divided
    dimension on), and the length of each rank's row.
    """
    inner = shape[split.dim + 1 :].numel()
    bounds = [list(split.bounds(rank, size)) for rank in range(size)]
    row_lengths = [0 for _ in range(size)]
    spans = []
    for section in range(len(split.sections)):
        for rank in range(size):
            begin, end = bounds[rank][section]
            span = _Span(rank, begin * inner, row_lengths[rank], (end - begin) * inner)
            spans.append(span)
            row_lengths[rank] += span.num
    return spans, row_lengths


def _follow(
    begins: Sequence[int], spans: Sequence[_Span], start: int, stop: int
) -> Iterator[tuple[int, _Span, int, int]]:
    """Yield the stretches of numbers `start` to `stop`: row, span, first number within the span,
    how many. `begins` is where each span begins in its row.
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
class RankPart:
    """The part of one weight that a rank has.

    Attributes:
        split: how the ranks of the group divide the weight.
        rank: of this rank in the group.
        size: ranks of the group.
    """

    split: Split
    rank: int
    size: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the whole weight, contiguous and of its own memory."""
        return self.split.part(whole, self.rank, self.size)


def part_of(weight: torch.Tensor, *, tensor_rank: int, tensor_size: int) -> RankPart | None:
    """Return this rank's part of a weight, in a tensor group, an expert group or both; None if the
    weight is whole.
    """
    split = split_of(weight)
    experts = expert_part_of(weight)
    if split is None:
        return experts
    if experts is None:
        return RankPart(split, tensor_rank, tensor_size)
    # Tensor ranks have equally many experts each, and share them with the ranks of their groups:
    # in the order of both, all ranks have equally many.
    return RankPart(split, tensor_rank * experts.size + experts.rank, tensor_size * experts.size)


def parts_of(
    names: Mapping[torch.Tensor, str], *, tensor_rank: int, tensor_size: int
) -> dict[str, RankPart]:
    """Return this rank's parts of the weights that are divided, by name."""
    parts: dict[str, RankPart] = {}
    for tensor, name in names.items():
        part = part_of(tensor, tensor_rank=tensor_rank, tensor_size=tensor_size)
        if part is not None:
            parts[name] = part
    return parts
