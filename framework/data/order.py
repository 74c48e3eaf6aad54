"""Order of the samples: a pure function of (seed, epoch, step, rank), so any step can be resumed.

An epoch is one permutation of the dataset. Its step s takes the next `global_size` samples of it,
and data-parallel rank r an equal contiguous slice of those, cut into micro-batches. The samples of
a step therefore do not depend on the number of ranks: a run continued on more or fewer devices sees
the same data.

An epoch has floor(N / global_size) steps. The last samples that fill no step are left out; the next
epoch's order leaves out others (unless `shuffle` is off: then the same last samples are never
seen).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# One stable hash from integers to 64-bit seeds, the same on every machine and in every version.
# splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), its state
# folded over the parts. Python's `hash` and numpy's `SeedSequence` are not used: the first is no
# promise, the second costs 10 us per seed.
Seeds = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


def mix(*parts: int | npt.NDArray[np.integer]) -> Seeds:
    """Hash the parts, in order, elementwise.

    Args:
        parts: integers (taken modulo 2**64) or one-dimensional integer arrays of one length N.

    Returns:
        Seeds of shape (N,), or (1,) when every part is a plain integer. ``mix(0)`` is the first
        output of splitmix64 seeded with 0.
    """
    state: Seeds = np.zeros(1, dtype=np.uint64)
    for part in parts:
        if isinstance(part, int):
            word = np.uint64(part & _MASK)
        else:
            word = part.astype(np.uint64)
        state = _scramble((state ^ word) + _GAMMA)
    return state


def mix_int(*parts: int) -> int:
    """Hash plain integers by `mix`, to a plain integer in [0, 2**64)."""
    return int(mix(*parts)[0])


def _scramble(state: Seeds) -> Seeds:
    """Apply the output function of splitmix64: a bijection that spreads every input bit over all
    output bits.
    """
    state = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _MULTIPLIERS[1]
    scrambled: Seeds = state ^ (state >> _SHIFTS[2])
    return scrambled


_ORDER_SALT: Final = 0x0DE5

SampleKey = tuple[int, int]
"""(epoch, sample index)."""


@dataclass(frozen=True)
class Share:
    """Share of a rank in a global batch: global_size = micro_size x accumulation_steps x
    world_size, in samples.

    `rank` and `world_size` are of data parallelism. The plan guarantees the equation.
    """

    global_size: int
    micro_size: int
    accumulation_steps: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        product = self.micro_size * self.accumulation_steps * self.world_size
        assert product == self.global_size, f"global batch {self.global_size} != {product}"
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}"

    def positions(self, first_step: int, num_steps: int) -> Positions:
        """Return the positions of this rank's samples in an epoch's order: (num_steps x
        accumulation_steps, micro_size) int64.
        """
        per_rank = self.global_size // self.world_size
        steps = np.arange(first_step, first_step + num_steps)
        starts = steps * self.global_size + self.rank * per_rank
        positions: Positions = starts[:, None] + np.arange(per_rank)
        return positions.reshape(-1, self.micro_size)


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the order in which an epoch, counted from 0, visits the N samples; without `shuffle`
    0, 1, ..., N - 1.

    Returns:
        A permutation of 0 to N - 1, (N,) int64: `torch.randperm` of a CPU generator seeded with
        ``mix_int(0x0DE5, seed, epoch)`` (torch uses the lower 32 bits).
    """
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(mix_int(_ORDER_SALT, seed, epoch))
    return torch.randperm(num_samples, generator=generator)


LATEST_ORDER: Final = 2
"""Version of new runs. Version 1, of checkpoints that name none, keeps permutations in memory."""
_COMPUTED_FROM: Final = 1 << 20  # samples; a smaller permutation of torch's has at most 8 MB
_ROUNDS: Final = 8
_AT_ONCE: Final = 4096  # positions that are computed together


class ComputedOrder:
    """A permutation of 0 to N - 1 that computes only the requested part: it needs no memory for any
    N.

    A Feistel network over pairs of digits (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", 4.2 generalised Feistel cipher with cycle walking): x = left + side * right with side
    = ceil(sqrt(N)); each round adds a hash of one digit to the other, modulo side. A result of N or
    above goes through once more.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        """Take N, `run.seed`, and the epoch from 0."""
        self._num_samples = num_samples
        self._side = math.isqrt(num_samples - 1) + 1
        self._keys = [mix_int(_ORDER_SALT, seed, epoch, number) for number in range(_ROUNDS)]

    def __getitem__(self, positions: Positions) -> Positions:
        """Return the samples at these positions, each from 0 to N - 1, in the same shape."""
        samples = self._permute(positions.astype(np.uint64).ravel())
        while (outside := samples >= self._num_samples).any():
            samples[outside] = self._permute(samples[outside])
        return samples.astype(np.int64).reshape(positions.shape)

    def _permute(self, numbers: Seeds) -> Seeds:
        side = np.uint64(self._side)
        right, left = np.divmod(numbers, side)
        for key in self._keys:
            left, right = right, (left + _scramble((right ^ np.uint64(key)) * _GAMMA)) % side
        joined: Seeds = left + side * right
        return joined


Order = Callable[[Positions], Positions]
"""Positions in an order -> the samples at them, in the same shape."""


def order_of_epoch(
    num_samples: int, *, seed: int, epoch: int, shuffle: bool, version: int
) -> Order:
    """Return the order in which an epoch visits the samples, as a function of positions. Arguments
    are as in `epoch_order`.
    """
    if not shuffle:
        return lambda positions: positions
    if version > 1 and num_samples >= _COMPUTED_FROM:
        return ComputedOrder(num_samples, seed=seed, epoch=epoch).__getitem__
    return epoch_order(num_samples, seed=seed, epoch=epoch, shuffle=True).numpy().take


def in_sequence(step: int) -> Order:
    """Return the order 0, 1, 2, ..., for any step."""
    return lambda positions: positions


@dataclass(frozen=True)
class Ordering:
    """Order of a run's training samples.

    Attributes:
        shuffle: visit the samples of every epoch in random order.
        version: of the order of samples that the run began with.
        bucket_steps: `data.bucket_steps`.
        curriculum_steps: `data.curriculum_steps`.
    """

    shuffle: bool = False
    version: int = LATEST_ORDER
    bucket_steps: int = 0
    curriculum_steps: int = 0


class MicroBatchSampler:
    """Endless lists of sample keys, one per micro-batch of this rank."""

    def __init__(
        self,
        num_samples: int,
        *,
        share: Share,
        seed: int,
        shuffle: bool,
        start_step: int = 0,
        version: int = LATEST_ORDER,
        order_of: Callable[..., Order] | None = None,
        first_steps: int = 0,
        order_of_first: Callable[[int], Order] = in_sequence,
    ) -> None:
        """Describe the stream; every iteration starts anew.

        Args:
            num_samples: as in `epoch_order`; so are `seed` and `shuffle`.
            share: of this rank.
            start_step: counted from the beginning of the run; epoch e starts at step e x
                floor(num_samples / global_size).
            version: of the order, as the run began with it.
            order_of: returns the order of an epoch, given `epoch`, instead of `order_of_epoch`;
                `version` is not used then.
            first_steps: number of steps before the first epoch.
            order_of_first: returns the order of one of these steps.
        """
        self._order = order_of or partial(
            order_of_epoch, num_samples, seed=seed, shuffle=shuffle, version=version
        )
        self._first_steps = first_steps
        self._order_of_first = order_of_first
        self._share = share
        self._start_step = start_step
        self._steps_per_epoch = num_samples // share.global_size
        assert self._steps_per_epoch > 0, (
            f"{num_samples} samples do not fill a batch of {share.global_size}"
        )

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield (epoch, sample index) keys of one micro-batch after the other, without end. The
        first steps, before all epochs, count as epochs -1, -2, ...
        """
        for step in range(self._start_step, self._first_steps):
            for indices in self._order_of_first(step)(self._share.positions(0, 1)).tolist():
                yield [(-1 - step, index) for index in indices]
        epoch, step = divmod(max(self._start_step - self._first_steps, 0), self._steps_per_epoch)
        steps_at_once = max(1, _AT_ONCE * self._share.world_size // self._share.global_size)
        while True:
            order = self._order(epoch=epoch)
            for first in range(step, self._steps_per_epoch, steps_at_once):
                num_steps = min(steps_at_once, self._steps_per_epoch - first)
                for indices in order(self._share.positions(first, num_steps)).tolist():
                    yield [(epoch, index) for index in indices]
            epoch += 1
            step = 0
