"""Loaders: training and evaluation data of one rank, and the start of their worker processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from framework.data.batches import (
    LoaderSamples,
    SeededBatches,
    SeededSamples,
    as_it_is,
    collate,
    own_collate,
)
from framework.data.failures import Claims, claims_nothing, explaining_data
from framework.data.order import (
    MicroBatchSampler,
    Order,
    Ordering,
    Share,
    in_sequence,
    mix_int,
    order_of_epoch,
)
from framework.errors import ConfigError

_WORKER_SALT: Final = 0x3017
_WORKER_SEED: Final = 0
_EVALUATION_SEED: Final = 0xE7A2  # for draws of a `collate_fn`; `run.seed` is for training


def _loader(
    samples: Any,
    batches: Iterable[Any],
    *,
    dataset: Any,
    seed: int,
    worker_seed: int,
    fetching: dict[str, Any],
) -> DataLoader[Any]:
    """Make a `DataLoader` of a dataset.

    Args:
        samples: the dataset as it is read, with the keys in `batches`.
        batches: lists of keys.
        dataset: the dataset itself, for its own `collate_fn`.
        seed: for random draws of that `collate_fn`.
        worker_seed: for the seeds that torch gives to workers.
        fetching: further arguments of the `DataLoader`.
    """
    own = own_collate(dataset)
    return DataLoader(
        LoaderSamples(samples, own=own, seed=seed),
        batch_sampler=batches,
        collate_fn=collate if own is None else as_it_is,
        worker_init_fn=_init_of_workers(fetching["num_workers"]),
        # Without a generator here, every iterator draws its workers' seeds from the global one.
        generator=torch.Generator().manual_seed(worker_seed),
        **fetching,
    )


def _init_of_workers(num_workers: int) -> Callable[[int], None] | None:
    """Return the `worker_init_fn` of a `DataLoader`; None without workers."""
    if not num_workers:
        return None
    from framework.data.workers import init_of_workers

    return init_of_workers()


def end_workers(batches: Iterator[Any]) -> None:
    """End the workers behind the iterator of a `DataLoader`, if it has any, and wait for their end.

    An iterator that is only dropped ends its workers when it is collected. But a worker's error
    holds the iterator in a reference cycle, and the collector may free its queues first: the
    workers, which ignore signals, would then wait for ever, and so would the end of the process.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)  # none without workers
    if shut_down is not None:
        shut_down()


def is_stream(dataset: Any) -> bool:
    """Check whether a dataset is a stream: an `IterableDataset`, or an iterable of no builtin type
    that has no samples by number (`__getitem__`).
    """
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") or type(dataset).__module__ == "builtins":
        return False
    return hasattr(dataset, "__iter__")


def num_samples_of(dataset: Any) -> int | None:
    """Count the samples of an epoch; None for a stream, which would have to be read for it."""
    if is_stream(dataset):
        return None
    if orders_itself(dataset):
        return int(dataset.num_ordered)
    return len(dataset)


def orders_itself(dataset: Any) -> bool:
    """Check whether a dataset has an order of its own, of a sampler: `num_ordered` samples an
    epoch (0 with an empty sampler), numbered by `epoch_order`.
    """
    return getattr(dataset, "num_ordered", None) is not None


@dataclass(frozen=True)
class Reading:
    """How a rank reads training samples.

    Attributes:
        seed: `run.seed`.
        random_samples: reading a sample draws random numbers, which are then seeded per (seed,
            epoch, index). Draws of the dataset's own `collate_fn` are seeded in any case.
        num_workers: `data.num_workers`.
        prefetch_batches: batches that each worker keeps ready.
        pin_memory: put batches into page-locked memory, which a device reads by itself.
        claims: decides which errors of the data this rank reports.
    """

    seed: int
    random_samples: bool = False
    num_workers: int = 0
    prefetch_batches: int = 2
    pin_memory: bool = False
    claims: Claims = claims_nothing

    def fetching(self) -> dict[str, Any]:
        """Return the arguments of a `DataLoader`; torch refuses a prefetch without workers."""
        arguments: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
        }
        if self.num_workers > 0:
            arguments["prefetch_factor"] = self.prefetch_batches
        return arguments


class TrainLoader:
    """Micro-batches of one rank, their content a pure function of (seed, step, rank): see `order`
    and `batches`.

    The stream has no state to save: to resume after k steps, start it at step k. One `DataLoader`
    iterator serves the whole stream, so that its workers live through all epochs and fetch the next
    epoch's first batches ahead.
    """

    def __init__(self, dataset: Any, *, share: Share, reading: Reading, ordering: Ordering) -> None:
        """Check that an epoch has a step; nothing is read yet.

        Args:
            dataset: map-style; its `collate_fn`, if it has one, makes the batches (otherwise
                torch's default).
            share: of this rank in a step.
            reading: how samples are read.
            ordering: the order of the samples.

        Raises:
            ConfigError: kinds ``dataset-smaller-than-batch``, ``data-without-lengths``.
        """
        self._dataset = dataset
        self._rank = share.rank
        self._reading = reading
        num_samples = num_samples_of(dataset) or 0
        self._make_sampler = _sampler_maker(
            dataset, num_samples, share, ordering, seed=reading.seed
        )
        self.steps_per_epoch: int = num_samples // share.global_size
        if self.steps_per_epoch == 0:
            if num_samples:
                fix = f"set batch.global_size to {num_samples} or less, or train on more data"
            else:  # the user's sampler is empty; a dataset that is was refused before
                fix = "give the DataLoader a sampler that has samples"
            raise ConfigError.of(
                "dataset-smaller-than-batch",
                f"the training set has {num_samples} samples, so not one batch of "
                f"{share.global_size} can be filled",
                fix,
                "batch.global_size",
                share.global_size,
            )

    def stream(self, start_step: int = 0) -> Generator[Any, None, None]:
        """Yield this rank's micro-batches from optimizer step `start_step` on, without end; samples
        of earlier steps are not fetched. Closing the generator ends the workers; torch's global
        random state is neither read nor changed.
        """
        reading = self._reading
        sample_seed = reading.seed if reading.random_samples else None
        in_one = own_collate(self._dataset) is None
        loader = _loader(
            SeededSamples(self._dataset, seed=sample_seed, in_one=in_one),
            self._make_sampler(start_step=start_step),
            dataset=self._dataset,
            seed=reading.seed,
            worker_seed=mix_int(_WORKER_SALT, reading.seed, self._rank),
            fetching=reading.fetching(),
        )
        with explaining_data(reading.claims):
            batches = iter(loader)
            try:
                yield from batches
            finally:
                end_workers(batches)


def _sampler_maker(
    dataset: Any, num_samples: int, share: Share, ordering: Ordering, *, seed: int
) -> Callable[..., MicroBatchSampler]:
    """Return the function that makes this rank's sampler, given its `start_step`.

    Raises:
        ConfigError: kind ``data-without-lengths``: `ordering` orders by length.
    """
    if orders_itself(dataset):
        order_of = partial(dataset.epoch_order, seed=seed)
    else:
        order_of = partial(
            order_of_epoch,
            num_samples,
            seed=seed,
            shuffle=ordering.shuffle,
            version=ordering.version,
        )
    order_of_first: Callable[[int], Order] = in_sequence
    if ordering.bucket_steps or ordering.curriculum_steps:
        from framework.data.lengths import bucketed, lengths_of, shortest_first
    if ordering.bucket_steps:
        order_of = bucketed(
            order_of,
            lengths_of(dataset, "data.bucket_steps"),
            np.arange(num_samples),
            seed=seed,
            size=share.global_size,
            steps=ordering.bucket_steps,
        )
    if ordering.curriculum_steps:
        lengths = lengths_of(dataset, "data.curriculum_steps")
        order_of_first = partial(
            shortest_first,
            by_length=np.argsort(lengths, kind="stable"),
            seed=seed,
            size=share.global_size,
            steps=ordering.curriculum_steps,
        )
    return partial(
        MicroBatchSampler,
        num_samples,
        share=share,
        seed=seed,
        shuffle=ordering.shuffle,
        order_of=order_of,
        first_steps=ordering.curriculum_steps,
        order_of_first=order_of_first,
    )


class FirstBatch(list[tuple[Any, bool]]):
    """The first batch of a pass of `of_batches`."""

    of_batches = 1


class EvalLoader:
    """Batches of one rank as (batch, counts).

    If `counts` is False the batch is padding: real samples, repeated only because under ZeRO-3 a
    forward pass is collective and every rank must make equally many. Its results must not enter a
    metric.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        max_samples: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        claims: Claims = claims_nothing,
    ) -> None:
        """Divide the dataset, map-style and not empty; nothing is read yet.

        All ranks together read the first `max_samples`. Workers stay for the next evaluation: each
        fork of a large rank is slow. `claims` is as in `Reading`.
        """
        self._claims = claims
        self._dataset = dataset
        self._pin_memory = pin_memory
        self._num_workers = num_workers
        num_samples = min(len(dataset), max_samples or len(dataset))
        self._batches = rank_batches(
            num_samples, batch_size=batch_size, rank=rank, world_size=world_size
        )
        self._loader = _loader(
            SeededBatches(dataset),
            [list(indices) for indices, _ in self._batches],
            dataset=dataset,
            seed=_EVALUATION_SEED,
            worker_seed=_WORKER_SEED,
            fetching={
                "num_workers": num_workers,
                "pin_memory": pin_memory,
                "persistent_workers": num_workers > 0,
            },
        )

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return len(self._batches)

    def first(self) -> FirstBatch:
        """Read the first batch alone, as every pass does.

        It is read by a worker where passes are: what a dataset opens at its first sample must not
        be there when other workers are forked.
        """
        indices, counts = self._batches[0]
        loader = _loader(
            SeededBatches(self._dataset),
            [list(indices)],
            dataset=self._dataset,
            seed=_EVALUATION_SEED,
            worker_seed=_WORKER_SEED,
            fetching={"num_workers": min(1, self._num_workers), "pin_memory": self._pin_memory},
        )
        with explaining_data(self._claims):
            batches = iter(loader)
            try:
                found = FirstBatch((batch, counts) for batch in batches)
            except Exception:
                end_workers(batches)
                raise
        found.of_batches = len(self)
        return found

    def __iter__(self) -> Generator[tuple[Any, bool], None, None]:
        """Yield the batches of one pass. The global random state is left as it was; the draws of
        samples and batches are the same in every pass.
        """
        with explaining_data(self._claims):
            batches = iter(self._loader)
            try:
                for batch, (_, counts) in zip(batches, self._batches, strict=True):
                    yield batch, counts
            except Exception:
                end_workers(batches)
                raise


def rank_batches(
    num_samples: int, *, batch_size: int, rank: int, world_size: int
) -> list[tuple[range, bool]]:
    """Return the sample numbers of a rank's batches; each with True if it counts.

    Args:
        num_samples: N, at least 1.
        batch_size: samples per batch; a rank's last real batch may have fewer.
        rank: of data parallelism, from 0 to world_size - 1.
        world_size: of data parallelism.

    Returns:
        ceil(ceil(N / world_size) / batch_size) pairs. Rank r counts the samples from floor(N r /
        world_size) up to floor(N (r + 1) / world_size). Their number differs by at most one between
        ranks: at most one batch is padding.
    """
    first = num_samples * rank // world_size
    end = num_samples * (rank + 1) // world_size
    batches = []
    for start in range(first, end, batch_size):
        batches.append((range(start, min(start + batch_size, end)), True))
    most_samples = -(-num_samples // world_size)
    num_batches = -(-most_samples // batch_size)
    while len(batches) < num_batches:
        batches.append((range(min(batch_size, num_samples)), False))
    return batches
