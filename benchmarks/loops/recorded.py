"""Batches of our loader as a dataset, so that other loops read the same samples in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, Sampler

# More samples than any block takes.
_ENDLESS = 10**9


class Recorded:
    """The first batches of this rank, over and over again.

    Sample numbers are those of all ranks: the first batch of rank 0, the first one of rank 1 and so
    on, then the second ones, as Accelerate and Hugging Face's Trainer deal batches out.
    """

    def __init__(
        self, loader: Any, num_batches: int, *, micro_size: int, rank: int, num_ranks: int
    ) -> None:
        self._batches = [list(batch) for batch in islice(loader.stream(0), num_batches)]
        self.micro_size = micro_size
        self.rank = rank
        self.num_ranks = num_ranks

    def from_step(self, start: int) -> Dataset[Any]:
        """Return the samples from a step on."""
        return _From(self, start)

    def indices_of_rank(self, rank: int) -> Sampler[int]:
        """Return the numbers of a rank's samples, in order."""
        return _OfRank(self, rank)

    def sample(self, start: int, number: int) -> tuple[Any, ...]:
        """Return a sample of this rank, `number` counted from step `start` on."""
        batch, place = divmod(number, self.micro_size)
        step, of_rank = divmod(batch, self.num_ranks)
        if of_rank != self.rank:
            raise IndexError(f"sample {number} is one of rank {of_rank}, not of {self.rank}")
        tensors = self._batches[(start + step) % len(self._batches)]
        return tuple(tensor[place] for tensor in tensors)


class _From(Dataset[Any]):
    def __init__(self, recorded: Recorded, start: int) -> None:
        self._recorded = recorded
        self._start = start

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return self._recorded.sample(self._start, number)


class _OfRank(Sampler[int]):
    def __init__(self, recorded: Recorded, rank: int) -> None:
        self._recorded = recorded
        self._rank = rank

    def __iter__(self) -> Iterator[int]:
        size = self._recorded.micro_size
        first = self._rank * size
        while True:
            yield from range(first, first + size)
            first += size * self._recorded.num_ranks

    def __len__(self) -> int:
        return _ENDLESS // self._recorded.num_ranks
