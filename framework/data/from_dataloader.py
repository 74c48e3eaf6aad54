"""Datasets and settings that are taken over from a `DataLoader`."""

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
    SequentialSampler,
    Subset,
    default_collate,
)

from framework.data.batches import fetched, random_state_kept, seed_generators
from framework.data.loaders import is_stream
from framework.data.order import Order, mix_int
from framework.errors import ConfigError
from framework.system.log import warn

_SAMPLER_SALT: Final = 0x5A91
# The run has these orders itself; it also divides them over ranks.
_KNOWN_ORDERS: Final = (SequentialSampler.__iter__, DistributedSampler.__iter__)


class _Taken:
    """A dataset with the `collate_fn` of its `DataLoader`."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._dataset = dataset
        if collate_fn is not None:
            self.collate_fn = collate_fn

    def __getattr__(self, name: str) -> Any:
        # While an object is unpickled, `_dataset` is not set yet.
        if name == "_dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class TakenStream(_Taken, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class TakenSet(_Taken):
    """A dataset of samples by number. With a sampler `num_ordered` is the number of samples in an
    epoch.
    """

    def __init__(self, dataset: Any, collate_fn: Any, sampler: Any) -> None:
        """Take a dataset, its `collate_fn` or None, and the sampler that orders every epoch, or
        None for the order of the run.
        """
        super().__init__(dataset, collate_fn)
        self._sampler = sampler
        self.num_ordered = None if sampler is None else len(sampler)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return fetched(self._dataset, indices)

    def epoch_order(self, epoch: int, *, seed: int) -> Order:
        """Return the order of an epoch, drawn from the sampler with a seed of (seed, epoch): the
        same on every rank, at any time.

        It calls the sampler's `set_epoch` and seeds its generator, if it has them; the global
        generators are left as they were.

        Raises:
            ConfigError: kind ``sampler-order``: the order has another length than `num_ordered`, or
                a number that is no sample's.
        """
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        generator = getattr(self._sampler, "generator", None)
        number = mix_int(_SAMPLER_SALT, seed, epoch)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        with random_state_kept():
            seed_generators(number)
            order = np.fromiter(self._sampler, dtype=np.int64)
        are_samples = bool(np.all((order >= 0) & (order < len(self))))  # true of an empty order
        if len(order) != self.num_ordered or not are_samples:
            reason = (
                f"epoch {epoch} has {len(order)} samples of {len(self)}, and the first one "
                f"{self.num_ordered}"
            )
            fix = "let every epoch have as many, each with a number of the dataset"
            raise ConfigError.of("sampler-order", reason, fix, "data", type(self._sampler).__name__)
        return order.take


def taken_over(given: Any, *, key: str, trains: bool) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of a `DataLoader`, and its settings: `micro_size`, `num_workers`, and
    `shuffle` if it is known. Another object is the dataset itself, without settings.

    Args:
        given: a `DataLoader`, or any dataset.
        key: the argument or config key that messages name.
        trains: whether it is for training: then an unknown sampler orders every epoch anew. For
            evaluation its order is drawn once, here.

    Raises:
        ConfigError: kind ``loader-not-taken``: something else than a sampler makes its batches, its
            sampler divides over ranks, or its `worker_init_fn` may divide a stream.
    """
    if not isinstance(given, DataLoader):
        return as_tensors(given), {}
    dataset = as_tensors(given.dataset)
    batches = given.batch_sampler
    if given.batch_size is None and type(batches) is not BatchSampler:
        reason = f"its {'dataset' if batches is None else 'batch_sampler'} makes the batches"
        fix = "give it a batch_size and a sampler"
        raise ConfigError.of("loader-not-taken", reason, fix, key, "DataLoader")
    collate_fn = None if given.collate_fn is default_collate else given.collate_fn
    size = given.batch_size or batches.batch_size  # type: ignore[union-attr]
    taken: dict[str, Any] = {"num_workers": given.num_workers, "micro_size": size}
    _check_worker_init(given, key=key)
    if is_stream(dataset):
        if collate_fn is None:
            return dataset, taken
        return TakenStream(dataset, collate_fn), taken
    sampler: Any = batches.sampler  # type: ignore[union-attr]
    is_shuffled = _shuffles_all(sampler, dataset)
    if is_shuffled or type(sampler).__iter__ in _KNOWN_ORDERS:
        taken["shuffle"] = is_shuffled or getattr(sampler, "shuffle", False)
        sampler = None
    elif getattr(sampler, "num_replicas", 1) > 1:
        reason = (
            f"its sampler, {type(sampler).__name__}, has an order of each rank's own, and "
            "ranks are divided by the run"
        )
        fix = "give it a sampler of the whole order (num_replicas=1, rank=0)"
        raise ConfigError.of("loader-not-taken", reason, fix, key, "DataLoader")
    if sampler is not None and not trains:  # all ranks have to draw the same
        order = TakenSet(dataset, None, sampler).epoch_order(0, seed=0)
        dataset = Subset(dataset, order(np.arange(len(sampler))).tolist())
        sampler = None
    if collate_fn is None and sampler is None:
        return dataset, taken
    return TakenSet(dataset, collate_fn, sampler), taken


def _shuffles_all(sampler: Any, dataset: Any) -> bool:
    if type(sampler).__name__ != "RandomSampler":  # torchdata has a class of that name as well
        return False
    return not sampler.replacement and len(sampler) == len(dataset)


def _check_worker_init(given: DataLoader[Any], *, key: str) -> None:
    """Raise a ConfigError for a `worker_init_fn` of a stream, which it may divide over workers;
    warn of one of a dataset with samples by number.
    """
    if given.worker_init_fn is None or not given.num_workers:
        return
    if is_stream(given.dataset):
        reason = (
            "its worker_init_fn is not called, and may be what divides the stream over the workers"
        )
        fix = (
            "let the dataset's __iter__ ask torch.utils.data.get_worker_info(), and leave "
            "worker_init_fn out"
        )
        raise ConfigError.of("loader-not-taken", reason, fix, key, "DataLoader")
    warn(
        f"{key}: the DataLoader's worker_init_fn is not called: the run seeds Python, numpy and "
        "torch for every sample [worker-init-not-called]",
        is_of_all_ranks=True,
    )


def as_tensors(dataset: Any) -> Any:
    """Set torch's format for a Hugging Face dataset without a format: it would give lists, which
    nothing can be computed with.
    """
    if not type(dataset).__module__.startswith("datasets.") or not hasattr(dataset, "with_format"):
        return dataset
    if is_stream(dataset):
        formatting = dataset._formatting
    else:
        formatting = dataset.format["type"]
    if formatting is None:
        return dataset.with_format("torch")
    return dataset
