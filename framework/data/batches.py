"""Samples read into batches: a sample's randomness (augmentation) is a pure function of (seed,
epoch, sample index), and a batch's is one of its first sample's key; collation, and errors of
samples that cannot be stacked.

Otherwise another worker count, rank count or a resume would train on other images, and a
`collate_fn` that draws (mixed images) would give the first stage of a pipeline the inputs of one
draw and the last stage the targets of another.

Covered are torch's CPU default generator, numpy's legacy global state and Python's `random`. A
generator that a dataset keeps for itself (`np.random.default_rng()` in its constructor) is out of
reach.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from framework.data.order import SampleKey, Seeds, mix, mix_int
from framework.errors import ConfigError
from framework.system.exits import refusing_exits

Collate = Callable[[Any], Any]
_SAMPLE_SALT: Final = 0x5A3B
_EVALUATION_SALT: Final = 0xE7A1
_COLLATE_SALT: Final = 0xC011
_32_BITS: Final = 0xFFFF_FFFF


@dataclass(frozen=True)
class WholeBatch:
    """Result of `__getitems__` of a dataset here: a batch that needs no collating, (batch, ...) per
    field: tensors, `Pixels`, or tensors by name.
    """

    fields: tuple[Any, ...]


@dataclass(frozen=True)
class Normalise:
    """Arithmetic that makes float32 of uint8 images (..., C, H, W), an operation at a time:
    (pixel x scale + shift) / divisor.

    On a device each operation is a kernel that rounds as a processor does, so that the results are
    equal to the bit. As one kernel they might not be: compilers round a product and a sum once.

    Attributes:
        scale: a number, or one for each channel.
        shift: for each channel.
        divisor: for each channel; none: nothing is divided.
    """

    scale: float | tuple[float, ...]
    shift: tuple[float, ...]
    divisor: tuple[float, ...] = ()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images as float32, on their device and in their layout."""
        device = images.device
        if isinstance(self.scale, float):
            # A number, and no tensor, as torchvision has it.
            scaled = torch.mul(images, self.scale)
        else:
            scaled = torch.mul(images, _of_channels(self.scale, device))
        scaled.add_(_of_channels(self.shift, device))
        if self.divisor:
            scaled.div_(_of_channels(self.divisor, device))
        return scaled


@lru_cache(maxsize=64)
def _of_channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as float32 (C, 1, 1), and keep them: each copy would wait for the device."""
    return torch.tensor(values, dtype=torch.float64).float().view(-1, 1, 1).to(device)


@dataclass(frozen=True)
class Pixels:
    """Images of a batch as they are stored, until they are on the device: a quarter of the bytes of
    the float32 that a model reads.

    Attributes:
        images: uint8 (B, C, H, W).
        normalise: makes what the model reads.
    """

    images: Tensor
    normalise: Normalise

    def to(self, device: torch.device) -> Pixels:
        """Return the images on a device, without waiting for it."""
        return Pixels(self.images.to(device, non_blocking=True), self.normalise)

    def pin_memory(self) -> Pixels:
        """Return the images in page-locked memory: `DataLoader` calls it."""
        return Pixels(self.images.pin_memory(), self.normalise)

    def normalised(self) -> Tensor:
        """Return what the dataset's own samples are: float32."""
        return self.normalise(self.images)


@runtime_checkable
class HasPixels(Protocol):
    """A dataset that can leave its images as they are stored."""

    def in_pixels(self) -> Any:
        """Return the same dataset with a batch's images as `Pixels`; or the dataset itself, where
        it was changed in a way that this would lose.
        """


def in_pixels(dataset: Any) -> Any:
    """Return a dataset whose batches have `Pixels`, if it can do that, or the dataset itself."""
    if isinstance(dataset, HasPixels):
        return dataset.in_pixels()
    return dataset


class BatchDataset(Dataset[tuple[Any, ...]]):
    """A dataset that is read a batch at a time."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        batch = self.__getitems__([range(len(self))[index]])
        return tuple(field[0] for field in batch.fields)

    def __getitems__(self, indices: Sequence[int]) -> WholeBatch:
        raise NotImplementedError


def collate(samples: Any) -> Any:
    """Pass a `WholeBatch` through as the tuple of its fields; otherwise do what torch's
    `default_collate` does.

    Raises:
        ConfigError: kind ``samples-differ`` or ``sample-type``: the samples cannot be stacked.
    """
    if isinstance(samples, WholeBatch):
        return samples.fields
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError, AttributeError, IndexError) as error:
        from framework.data.stacking_errors import stacking_problem

        problem = stacking_problem(list(samples))
        if problem is None:  # another cause, such as no room in shared memory
            raise
        raise ConfigError(problem) from error


def own_collate(dataset: Any) -> Collate | None:
    """Return the dataset's own `collate_fn`, for example one that pads texts, or None."""
    collate_fn = getattr(dataset, "collate_fn", None)
    if callable(collate_fn):
        return collate_fn  # type: ignore[no-any-return]
    return None


@runtime_checkable
class DrawsFromSeeds(Protocol):
    """A dataset that draws all of a sample's randomness from a seed it is given: no global state,
    no setup.
    """

    def items_from_seeds(self, indices: Sequence[int], seeds: Seeds) -> WholeBatch:
        """Read a batch of the samples `indices`, with seeds uint64 of shape (len(indices),)."""


class _GeneratorStates:
    """States of torch's CPU, numpy's and Python's global generators, taken when it is made."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._words = _words_of_numpy()

    def are_current(self) -> bool:
        """Check that no number was drawn from any of the generators since."""
        if not torch.equal(torch.get_rng_state(), self._torch):
            return False
        if random.getstate() != self._python or _words_of_numpy() != self._words:
            return False
        # numpy draws two normal numbers at once, and keeps the second: its next normal number
        # changes nothing but the end of this state.
        has_second_normal = self._numpy[3]
        return not has_second_normal or self._numpy[3:] == tuple(np.random.get_state())[3:]

    def put_back(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _words_of_numpy() -> bytes:
    """Read the state of numpy's global generator, 624 words of 4 bytes and a position, from its
    memory (`mt19937_state`): `get_state` takes 24 us.
    """
    generator = np.random.mtrand._rand._bit_generator
    return ctypes.string_at(generator.ctypes.state_address, 4 * 625)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore torch's CPU, numpy's and Python's global generators at the end of the block."""
    states = _GeneratorStates()
    try:
        yield
    finally:
        states.put_back()


def seed_generators(seed: int) -> None:
    """Seed torch's CPU, numpy's and Python's global generators.

    Not `torch.manual_seed`: that would also reset the GPU generators (the model's dropout), and in
    a worker process, where CUDA is not initialised, it records a stack trace on every call (110 us
    against 1 us).
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & _32_BITS)
    random.seed(seed)


class _Wrapper(Dataset[Any]):
    """A map-style dataset, read in another way, whole batches at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)


class SeededSamples(_Wrapper):
    """A dataset with every sample read from its own random state; the surrounding state is left
    untouched.

    Seeding takes as long as reading many a sample, and most datasets draw nothing: a batch is read
    without seeds, and once more, seeded, if a generator has moved. From then on all are seeded.
    """

    def __init__(self, dataset: Any, *, seed: int | None, in_one: bool = False) -> None:
        """Wrap a dataset. `seed` is `run.seed`, or None if samples draw nothing; with `in_one`,
        tensors may be read as a whole batch.
        """
        super().__init__(dataset)
        self.seed = seed
        self._in_one = in_one
        source = dataset
        while type(source) is Subset:
            source = source.dataset
        self._are_tensors = in_one and type(source) is TensorDataset  # which draws nothing
        self._from_seeds = isinstance(dataset, DrawsFromSeeds)
        self._draws = False

    def __getitems__(self, keys: Sequence[SampleKey]) -> Any:
        """Read the samples of (epoch, index) keys: a list, or a `WholeBatch`.

        An error of the first, unseeded reading is raised only if nothing was drawn before it:
        otherwise it may be an error of that draw, and the samples are read again, seeded.
        """
        indices = [index for _, index in keys]
        if self._are_tensors:
            return read_together(self.dataset, indices, in_one=True)
        if self.seed is None:
            return fetched(self.dataset, indices)
        if self._from_seeds:
            return self.dataset.items_from_seeds(indices, self._seeds(keys))
        if self._draws:
            return self._read_seeded(indices, keys)
        states = _GeneratorStates()
        try:
            samples = read_together(self.dataset, indices, in_one=self._in_one)
        except Exception:
            if states.are_current():
                raise
        else:
            if states.are_current():
                return samples
        states.put_back()
        self._draws = True
        return self._read_seeded(indices, keys)

    def _read_seeded(self, indices: Sequence[int], keys: Sequence[SampleKey]) -> list[Any]:
        samples = []
        with random_state_kept():
            for index, seed in zip(indices, self._seeds(keys).tolist(), strict=True):
                seed_generators(seed)
                samples.append(self.dataset[index])
        return samples

    def _seeds(self, keys: Sequence[SampleKey]) -> Seeds:
        assert self.seed is not None
        epochs, indices = np.array(keys, dtype=np.int64).reshape(-1, 2).T
        return mix(_SAMPLE_SALT, self.seed, epochs, indices)


def read_together(dataset: Any, indices: list[int], *, in_one: bool) -> Any:
    """Read samples together if the dataset is known to have a faster way than one by one; otherwise
    one by one.

    With `in_one`, samples of a `TensorDataset` or a `BatchDataset`, or a part of one, may come as a
    `WholeBatch`; otherwise they come as a list.
    """
    if type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        return read_together(dataset.dataset, indices, in_one=in_one)
    if in_one and isinstance(dataset, BatchDataset):
        return dataset.__getitems__(indices)
    # `index_select` takes no negative indices.
    if type(dataset) is TensorDataset and in_one and min(indices) >= 0:
        rows = torch.tensor(indices)
        fields = []
        for tensor in dataset.tensors:
            fields.append(tensor.index_select(0, rows.to(tensor.device)))
        return WholeBatch(tuple(fields))
    # Hugging Face's
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


class SeededBatches(_Wrapper):
    """An evaluation dataset with the same random draws in every evaluation.

    Seeded once per batch (by its first index) and not per sample, so that a dataset's own fast
    `__getitems__` is kept.
    """

    def __getitems__(self, indices: Sequence[int]) -> Any:
        with random_state_kept():
            seed_generators(mix_int(_EVALUATION_SALT, indices[0]))
            return fetched(self.dataset, indices)


class LoaderSamples(_Wrapper):
    """Source of a `DataLoader`. A call of `exit()` in the dataset's code is an error with a place,
    also in a worker.

    With the dataset's own `collate_fn` it reads finished batches, with random draws that depend on
    the seed and the first key alone: a `DataLoader` passes its `collate_fn` neither the epoch nor
    the indices.
    """

    def __init__(self, dataset: Any, *, own: Collate | None, seed: int) -> None:
        """Wrap a dataset that is read by `SampleKey`s or plain indices. `own` is its `collate_fn`,
        which is seeded by `seed`.
        """
        super().__init__(dataset)
        self.own = own
        self.seed = seed

    def __getitems__(self, keys: Sequence[SampleKey] | Sequence[int]) -> Any:
        with refusing_exits():
            samples = fetched(self.dataset, keys)
            if self.own is None:
                return samples
            first = keys[0]
            key: tuple[int, ...]
            if isinstance(first, tuple):
                key = first
            else:
                key = (first,)
            return seeded_collate(self.own, samples, self.seed, key)


def seeded_collate(own: Collate, samples: Any, seed: int, key: tuple[int, ...]) -> Any:
    """Make a batch by a dataset's own `collate_fn`, with random draws by the seed and the key of
    the first sample.
    """
    with random_state_kept():
        seed_generators(mix_int(_COLLATE_SALT, seed, *key))
        return own(samples)


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged: the `collate_fn` of a `DataLoader` that reads finished batches."""
    return batch


def fetched(dataset: Any, indices: Sequence[Any]) -> Any:
    """Read samples by the dataset's `__getitems__` if it has one, otherwise one by one into a
    list.
    """
    fetch_all = getattr(dataset, "__getitems__", None)
    if fetch_all is not None:
        return fetch_all(indices)
    return [dataset[index] for index in indices]
