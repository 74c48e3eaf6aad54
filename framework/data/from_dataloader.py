"""Datasets and settings that are taken over from a `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from framework.data.order import Order, Positions, mix_int
from framework.errors import ConfigError
from framework.system.log import warn

_SAMPLER_SALT: Final = 0x5A91
_LONGEST: Final = 60  # characters of a batch in a message
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
        order = _drawn(self._sampler, epoch=epoch, seed=seed, draw=self._numbers)
        are_samples = bool(np.all((order >= 0) & (order < len(self))))  # true of an empty order
        if len(order) != self.num_ordered or not are_samples:
            reason = (
                f"epoch {epoch} has {len(order)} samples of {len(self)}, and the first one "
                f"{self.num_ordered}"
            )
            fix = "let every epoch have as many, each with a number of the dataset"
            raise self._refusal(reason, fix)
        return order.take

    def _numbers(self) -> Positions:
        return np.fromiter(self._sampler, dtype=np.int64)

    def _refusal(self, reason: str, fix: str) -> ConfigError:
        return ConfigError.of("sampler-order", reason, fix, "data", type(self._sampler).__name__)


class TakenBatches(TakenSet):
    """A dataset of samples by number with a `batch_sampler`, which makes the micro-batches.

    Attributes:
        batch_size: samples of every micro-batch; in evaluation, of the first batch.
    """

    def __init__(self, dataset: Any, collate_fn: Any, batches: Any, *, trains: bool) -> None:
        """Take a dataset, its `collate_fn` or None, and its sampler of batches. Epoch 0 is drawn
        twice: an order that cannot be drawn again would be another one on each rank.

        Raises:
            ConfigError: kind ``sampler-order``: there is no batch, a batch is no list of numbers,
                the second order differs, or batches for training have different sizes.
        """
        super().__init__(dataset, collate_fn, ())
        self._sampler = batches
        self._trains = trains
        self.batch_size = 0
        first = _drawn(batches, epoch=0, seed=0, draw=self._numbers)
        again = _drawn(batches, epoch=0, seed=0, draw=self._numbers)
        if not np.array_equal(first, again):
            reason = "epoch 0 has another order when it is drawn again, so it cannot be resumed"
            fix = (
                "draw from torch's, numpy's or Python's global generator, from a torch.Generator "
                "in its attribute generator, or from one that set_epoch(epoch) seeds"
            )
            raise self._refusal(reason, fix)
        if not self.batch_size:
            raise self._refusal("it makes no batch", "let every epoch have at least one")
        self.num_ordered = len(first)

    def _numbers(self) -> Positions:
        """Return the samples of all batches, one after the other; in training a shorter last batch
        is left out.
        """
        batches = [self._numbers_of(batch) for batch in self._sampler]
        if batches and not self.batch_size:
            self.batch_size = len(batches[0])
        if self._trains:
            self._keep_one_size(batches)
        return np.concatenate([np.empty(0, np.int64), *batches])

    def _numbers_of(self, batch: Any) -> Positions:
        with suppress(TypeError, ValueError):
            numbers = np.asarray(batch, dtype=np.int64)
            if numbers.ndim == 1:
                return numbers
        fix = "let every batch be a list of numbers of samples"
        raise self._refusal(f"it makes the batch {str(batch)[:_LONGEST]}", fix)

    def _keep_one_size(self, batches: list[Positions]) -> None:
        """Leave out a shorter last batch, and refuse batches of different sizes."""
        if batches and len(batches[-1]) < self.batch_size:
            batches.pop()
        sizes = {len(batch) for batch in batches} - {self.batch_size}
        if sizes:
            reason = f"it makes batches of {self.batch_size} and of {sizes.pop()} samples"
            fix = (
                "let all have one size, as a step has a fixed number of samples; or leave it out "
                "and set data.bucket_steps, which makes micro-batches of like lengths"
            )
            raise self._refusal(reason, fix)

    def check_kept(self, *, micro_size: Any, by_length: Mapping[str, int]) -> None:
        """Refuse a run whose micro-batches would be others than the sampler's.

        Args:
            micro_size: samples of a micro-batch, or ``measured``.
            by_length: keys with steps whose order goes by length, 0 for none.

        Raises:
            ConfigError: kind ``sampler-order``.
        """
        made = f"the data's {type(self._sampler).__name__} makes batches of {self.batch_size}"
        if micro_size != self.batch_size:
            fix = f"set batch.micro_size: {self.batch_size}, or give it another batch_size"
            raise ConfigError.of("sampler-order", made, fix, "batch.micro_size", micro_size)
        for key, steps in by_length.items():
            if steps:
                reason = f"{made}, which an order by length would take apart"
                raise ConfigError.of(
                    "sampler-order", reason, "leave one of the two out", key, steps
                )


def _drawn(sampler: Any, *, epoch: int, seed: int, draw: Callable[[], Positions]) -> Positions:
    """Draw the order of an epoch with a seed of (seed, epoch), also of a sampler within the
    sampler; the global generators are left as they were.
    """
    number = mix_int(_SAMPLER_SALT, seed, epoch)
    for each in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
    with random_state_kept():
        seed_generators(number)
        return draw()


def taken_over(given: Any, *, key: str, trains: bool) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of a `DataLoader`, and its settings: `micro_size`, `num_workers`, and
    `shuffle` if it is known. Another object is the dataset itself, without settings.

    Args:
        given: a `DataLoader`, or any dataset.
        key: the argument or config key that messages name.
        trains: whether it is for training: then an unknown sampler orders every epoch anew. For
            evaluation its order is drawn once, here.

    Raises:
        ConfigError: kind ``loader-not-taken``: its dataset makes its batches, its sampler divides
            over ranks, or its `worker_init_fn` may divide a stream; kind ``sampler-order``: as in
            `TakenBatches`.
    """
    if not isinstance(given, DataLoader):
        return as_tensors(given), {}
    dataset = as_tensors(given.dataset)
    batches = given.batch_sampler
    if batches is None:
        reason = "its dataset makes the batches"
        fix = "give it a batch_size and a sampler"
        raise ConfigError.of("loader-not-taken", reason, fix, key, "DataLoader")
    collate_fn = None if given.collate_fn is default_collate else given.collate_fn
    if given.batch_size is None and type(batches) is not BatchSampler:
        _check_worker_init(given, key=key)
        _refuse_order_of_each_rank(batches, key=key)
        taken_batches = TakenBatches(dataset, collate_fn, batches, trains=trains)
        return _with_batches(taken_batches, given, trains=trains)
    size = given.batch_size or batches.batch_size  # type: ignore[attr-defined]
    taken: dict[str, Any] = {"num_workers": given.num_workers, "micro_size": size}
    _check_worker_init(given, key=key)
    if is_stream(dataset):
        if collate_fn is None:
            return dataset, taken
        return TakenStream(dataset, collate_fn), taken
    sampler: Any = batches.sampler  # type: ignore[attr-defined]
    is_shuffled = _shuffles_all(sampler, dataset)
    if is_shuffled or type(sampler).__iter__ in _KNOWN_ORDERS:
        taken["shuffle"] = is_shuffled or getattr(sampler, "shuffle", False)
        sampler = None
    else:
        _refuse_order_of_each_rank(sampler, key=key)
    if sampler is not None and not trains:  # all ranks have to draw the same
        order = TakenSet(dataset, None, sampler).epoch_order(0, seed=0)
        dataset = Subset(dataset, order(np.arange(len(sampler))).tolist())
        sampler = None
    if collate_fn is None and sampler is None:
        return dataset, taken
    return TakenSet(dataset, collate_fn, sampler), taken


def _with_batches(
    dataset: TakenBatches, given: DataLoader[Any], *, trains: bool
) -> tuple[Any, dict[str, Any]]:
    """Return a dataset with its sampler of batches, and the settings of its loader. In evaluation
    its order is drawn once.
    """
    taken = {"num_workers": given.num_workers, "micro_size": dataset.batch_size}
    if trains:
        return dataset, taken
    order = dataset.epoch_order(0, seed=0)
    samples: Any = dataset
    chosen = Subset(samples, order(np.arange(dataset.num_ordered or 0)).tolist())
    return TakenSet(chosen, getattr(dataset, "collate_fn", None), None), taken


def _refuse_order_of_each_rank(sampler: Any, *, key: str) -> None:
    """Refuse a sampler, of samples or of batches, that divides its order over ranks.

    Raises:
        ConfigError: kind ``loader-not-taken``.
    """
    inner = getattr(sampler, "sampler", None)
    if max(getattr(sampler, "num_replicas", 1), getattr(inner, "num_replicas", 1)) > 1:
        reason = (
            f"its sampler, {type(sampler).__name__}, has an order of each rank's own, and "
            "ranks are divided by the run"
        )
        fix = "give it a sampler of the whole order (num_replicas=1, rank=0)"
        raise ConfigError.of("loader-not-taken", reason, fix, key, "DataLoader")


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
