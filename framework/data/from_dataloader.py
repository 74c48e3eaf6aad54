"""Parts that are taken over of a `DataLoader`."""

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


class _Taken:
    """A dataset with the `collate_fn` of its `DataLoader`."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._dataset = dataset
        if collate_fn is not None:
            self.collate_fn = collate_fn

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):  # while it is unpickled there is none yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


class TakenStream(_Taken, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class TakenSet(_Taken):
    """One of samples by number. With a sampler `num_ordered` is the number of samples in an
    epoch.
    """

    def __init__(self, dataset: Any, collate_fn: Any, sampler: Any) -> None:
        """`sampler` gives the order of every epoch; None: it is the run's."""
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
        """The order of an epoch, asked of the sampler with a seed of (seed, epoch): the same
        whoever asks, and when; a ConfigError, kind ``sampler-order``, where it has another length
        than the first.
        """
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        own = getattr(self._sampler, "generator", None)
        number = mix_int(_SAMPLER_SALT, seed, epoch)
        if isinstance(own, torch.Generator):
            own.manual_seed(number)
        with random_state_kept():
            seed_generators(number)
            order = np.fromiter(self._sampler, dtype=np.int64)
        if len(order) != self.num_ordered or not 0 <= order.min() <= order.max() < len(self):
            reason = (
                f"epoch {epoch} has {len(order)} samples of {len(self)}, and the first one "
                f"{self.num_ordered}"
            )
            fix = "let every epoch have as many, each with a number of the dataset"
            raise ConfigError.of("sampler-order", reason, fix, "data", type(self._sampler).__name__)
        return order.take


def taken_over(given: Any, *, key: str, trains: bool) -> tuple[Any, dict[str, Any]]:
    """Take a `DataLoader` apart: its dataset; and `micro_size`, `num_workers`, `shuffle`, as far as
    it says.

    Raises:
        ConfigError: kind ``loader-not-taken``: something else than a sampler makes its batches.
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
    _look_at_worker_init(given, key=key)
    if is_stream(dataset):
        return (dataset if collate_fn is None else TakenStream(dataset, collate_fn)), taken
    sampler: Any = batches.sampler  # type: ignore[union-attr]
    is_whole = type(sampler).__name__ == "RandomSampler"  # torchdata has one as well
    is_whole = is_whole and not sampler.replacement and len(sampler) == len(dataset)
    usual = SequentialSampler.__iter__, DistributedSampler.__iter__  # ranks are divided by the run
    if is_whole or type(sampler).__iter__ in usual:
        taken["shuffle"], sampler = is_whole or getattr(sampler, "shuffle", False), None
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
    return (
        dataset if collate_fn is sampler is None else TakenSet(dataset, collate_fn, sampler)
    ), taken


def _look_at_worker_init(given: DataLoader[Any], *, key: str) -> None:
    """Refuse a `worker_init_fn` that may divide a stream over workers; warn of one over samples by
    number.
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
    """Hugging Face's datasets without a format of their own give lists, which nothing can be
    computed with.
    """
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "with_format"):
        if is_stream(dataset):
            formatting = dataset._formatting
        else:
            formatting = dataset.format["type"]
        if formatting is None:
            return dataset.with_format("torch")
        return dataset
    return dataset
