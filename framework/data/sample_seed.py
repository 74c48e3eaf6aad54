"""Randomness of samples (augmentation) as a pure function of (seed, epoch, sample index), and of batches as one of
their first.

Without this, what a random transform draws depends on which worker process fetches the sample and on all samples
fetched before: another worker count, rank count or a resume would train on other images. A `collate_fn` that draws
(hidden tokens, mixed images) would give the first stage of a pipeline the inputs of one draw and the last stage the
targets of another.

Covered are torch's CPU default generator, numpy's legacy global state and Python's `random`. A generator that a dataset
keeps for itself (`np.random.default_rng()` in its constructor) is out of reach.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset

from framework.data.batches import Collate, WholeBatch
from framework.data.order import SampleKey, Seeds, mix, mix_int
from framework.system.exits import refusing_exits

_SAMPLE_SALT: Final = 0x5A3B
_EVALUATION_SALT: Final = 0xE7A1
_COLLATE_SALT: Final = 0xC011
_32_BITS: Final = 0xFFFF_FFFF


@runtime_checkable
class DrawsFromSeeds(Protocol):
    """A dataset that draws all of a sample's randomness from a seed it is given: no global state, no setup."""

    def items_from_seeds(self, indices: Sequence[int], seeds: Seeds) -> WholeBatch:
        """A batch of the samples `indices`, seeds uint64 of shape (len(indices),)."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give torch's CPU, numpy's and Python's global generators back as they were found."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_generators(seed: int) -> None:
    """Seed torch's CPU, numpy's and Python's global generators.

    Not `torch.manual_seed`: that would also reset the GPU generators (the model's dropout), and in a worker process,
    where CUDA is not initialised, it records a stack trace on every call (110 us against 1 us).
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & _32_BITS)
    random.seed(seed)


class _Wrapper(Dataset[Any]):
    """Another dataset (map-style), read in another way, whole batches at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)


class SeededSamples(_Wrapper):
    """Wraps a dataset so that every sample is read with its own random state; the surrounding state is left untouched.

    It is read by `SampleKey`s through `__getitems__`, as a `DataLoader` does with a `KeyedMicroBatchSampler`.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        """Wrap `dataset` (map-style); `seed` is `run.seed`."""
        super().__init__(dataset)
        self.seed = seed

    def __getitems__(self, keys: Sequence[SampleKey]) -> Any:
        """The samples of (epoch, index) keys: a list, or whatever `items_from_seeds` of the dataset returns."""
        epochs, indices = np.array(keys, dtype=np.int64).reshape(-1, 2).T
        seeds = mix(_SAMPLE_SALT, self.seed, epochs, indices)
        if isinstance(self.dataset, DrawsFromSeeds):
            return self.dataset.items_from_seeds(indices.tolist(), seeds)
        samples = []
        with random_state_kept():
            for index, seed in zip(indices.tolist(), seeds.tolist(), strict=True):
                seed_generators(seed)
                samples.append(self.dataset[index])
        return samples


class SeededBatches(_Wrapper):
    """Wraps an evaluation dataset: a batch that draws random numbers gets the same in every evaluation.

    Seeded once per batch (by its first index) and not per sample, so that a dataset's own fast `__getitems__` is kept.
    """

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The samples, as `_fetched` gives them."""
        with random_state_kept():
            seed_generators(mix_int(_EVALUATION_SALT, indices[0]))
            return _fetched(self.dataset, indices)


class KeyedSamples(_Wrapper):
    """Wraps a dataset without randomness so that it is read by `SampleKey`s, of which it needs the index only."""

    def __getitems__(self, keys: Sequence[SampleKey]) -> Any:
        """The samples, as `_fetched` gives them."""
        return _fetched(self.dataset, [index for _, index in keys])


class LoaderSamples(_Wrapper):
    """Source of a `DataLoader`. Code that calls `exit()` is an error with a place there, also in a worker.

    With the dataset's own `collate_fn` it reads finished batches, whose draws depend on the seed and the first key
    alone: a `DataLoader` tells its `collate_fn` neither the epoch nor the indices.
    """

    def __init__(self, dataset: Any, *, own: Collate | None, seed: int) -> None:
        """`dataset` is read by `SampleKey`s or plain indices; `own` is its `collate_fn`, which `seed` is for."""
        super().__init__(dataset)
        self.own = own
        self.seed = seed

    def __getitems__(self, keys: Sequence[SampleKey] | Sequence[int]) -> Any:
        """The samples, as `_fetched` gives them, or the batch."""
        with refusing_exits():
            samples, first = _fetched(self.dataset, keys), keys[0]
            if self.own is None:
                return samples
            with random_state_kept():
                seed_generators(mix_int(_COLLATE_SALT, self.seed, *(first if isinstance(first, tuple) else (first,))))
                return self.own(samples)


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged: the `collate_fn` of a `DataLoader` whose batches are made already."""
    return batch


def _fetched(dataset: Any, indices: Sequence[Any]) -> Any:
    """The samples, as the dataset's `__getitems__` returns them if it has one, otherwise as a list."""
    fetch_all = getattr(dataset, "__getitems__", None)
    return fetch_all(indices) if fetch_all is not None else [dataset[index] for index in indices]
