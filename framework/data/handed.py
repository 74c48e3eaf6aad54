"""A `DataLoader`, or a dataset of Hugging Face's, as people have them: what is taken over of it, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from framework.data.batches import fetched, random_state_kept, seed_generators
from framework.data.order import Positions, mix_int
from framework.data.streams import is_stream
from framework.errors import ConfigError

_SAMPLER_SALT: Final = 0x5A91


class TakenSet:
    """A dataset with samples by number, with the `collate_fn` and the sampler of its `DataLoader`.

    Attributes:
        num_ordered: samples of an epoch, where the sampler decides; else None.
    """

    def __init__(self, dataset: Any, collate_fn: Any, sampler: Any) -> None:
        """`sampler` gives the order of every epoch; None: it is the run's."""
        self._dataset, self._sampler = dataset, sampler
        self.num_ordered: int | None = None
        if sampler is not None:
            is_of_batches = _gives_batches(sampler)
            self.num_ordered = len(self.epoch_order(seed=0, epoch=0)) if is_of_batches else len(sampler)
        if collate_fn is not None:
            self.collate_fn = collate_fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled there is no dataset yet
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return fetched(self._dataset, indices)

    def epoch_order(self, *, seed: int, epoch: int, micro_size: int | None = None) -> Positions:
        """The order of an epoch, asked of the sampler with a seed of (seed, epoch): the same whoever asks, and when.

        Raises:
            ConfigError: kind ``sampler-order``: batches are not of `micro_size`, or indices are not of the dataset.
        """
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        own, number = getattr(self._sampler, "generator", None), mix_int(_SAMPLER_SALT, seed, epoch)
        if isinstance(own, torch.Generator):
            own.manual_seed(number)
        with random_state_kept():
            seed_generators(number)
            found = list(self._sampler)
        if found and isinstance(found[0], Sequence):
            sizes = {len(batch) for batch in found[:-1]} or {len(found[0])}
            if micro_size is not None and sizes != {micro_size}:
                stated = ", ".join(map(str, sorted(sizes)[:4]))
                reason = f"the batch_sampler makes batches of {stated} samples, and a micro-batch has {micro_size}"
                fix = "make all batches as large as batch.micro_size, or hand over a sampler"
                raise ConfigError.of("sampler-order", reason, fix, "data", type(self._sampler).__name__)
            found = [index for batch in found if len(batch) in sizes for index in batch]
        order: Positions = np.array(found, dtype=np.int64)
        if self.num_ordered not in (None, len(order)) or (
            len(order) and not 0 <= order.min() <= order.max() < len(self)
        ):
            reason = f"epoch {epoch} has {len(order)} samples of {len(self)}, and the first one {self.num_ordered}"
            fix = "let every epoch have as many, each with a number of the dataset"
            raise ConfigError.of("sampler-order", reason, fix, "data", type(self._sampler).__name__)
        return order


class TakenStream(IterableDataset[Any]):
    """A stream with the `collate_fn` of its `DataLoader`."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._dataset, self.collate_fn = dataset, collate_fn

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


def taken_over(given: Any, *, key: str, trains: bool) -> tuple[Any, dict[str, Any]]:
    """Take a `DataLoader` apart; anything else as it is, and datasets of Hugging Face's give tensors.

    Returns:
        The dataset, with what belongs to it; and `micro_size`, `num_workers`, `shuffle`, as far as the loader says.

    Raises:
        ConfigError: kind ``loader-not-taken``: it makes no batches, or batches of more than one size.
    """
    if not isinstance(given, DataLoader):
        return as_tensors(given), {}
    dataset, batches = as_tensors(given.dataset), given.batch_sampler
    size = given.batch_size if given.batch_size is not None else getattr(batches, "batch_size", None)
    if given.batch_size is None and batches is None:
        reason, fix = (
            "its batch_size is None: its dataset makes the batches",
            "give it a batch_size, or an own collate_fn",
        )
        raise ConfigError.of("loader-not-taken", reason, fix, key, "DataLoader")
    collate_fn = None if given.collate_fn is default_collate else given.collate_fn
    taken: dict[str, Any] = {"num_workers": given.num_workers} | ({"micro_size": size} if size else {})
    if is_stream(dataset):
        return (dataset if collate_fn is None else TakenStream(dataset, collate_fn)), taken
    sampler: Any = given.sampler
    if given.batch_size is None:
        sampler = batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(sampler, DistributedSampler):  # ranks are divided by the run
        taken["shuffle"], sampler = sampler.shuffle, None
    elif type(sampler) is SequentialSampler or _is_permutation(sampler):
        taken["shuffle"], sampler = type(sampler) is RandomSampler, None
    if sampler is not None and not trains:
        chosen = [index for each in sampler for index in (each if isinstance(each, Sequence) else [each])]
        dataset, sampler = Subset(dataset, chosen), None
    if collate_fn is None and sampler is None:
        return dataset, taken
    return TakenSet(dataset, collate_fn, sampler), taken


def as_tensors(dataset: Any) -> Any:
    """Datasets of Hugging Face's without a format of their own give lists, which nothing could be computed with."""
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "with_format"):
        formatting = dataset._formatting if is_stream(dataset) else dataset.format["type"]
        return dataset.with_format("torch") if formatting is None else dataset
    return dataset


def _is_permutation(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _gives_batches(sampler: Any) -> bool:
    return isinstance(sampler, BatchSampler) or isinstance(next(iter(sampler), None), Sequence)
