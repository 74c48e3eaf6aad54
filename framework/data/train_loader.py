"""The training data of one rank, as an endless stream that can start at any optimizer step."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from framework.data.batches import collate, own_collate
from framework.data.order import KeyedMicroBatchSampler, MicroBatchSampler, Share
from framework.data.sample_seed import KeyedSamples, SamplesWithoutExit, SeededCollate, SeededSamples, as_it_is
from framework.data.seed_mix import mix_int
from framework.data.worker_process import init_of_workers
from framework.errors import ConfigError, Problem

_WORKER_SALT: Final = 0x3017


class TrainLoader:
    """Micro-batches of one rank, their content a pure function of (seed, step, rank): see `order` and `sample_seed`.

    The stream has no state to save: to go on after k steps, start it at step k. One `DataLoader` iterator serves the
    whole stream, so that its workers live through all epochs and fetch the next one's first batches ahead.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_size: int,
        micro_size: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        random_samples: bool = False,
    ) -> None:
        """Check that an epoch has a step; nothing is read yet.

        Args:
            dataset: map-style; its `collate_fn`, if it has one, makes the batches (otherwise torch's default).
            global_size: samples per optimizer step, micro_size x accumulation_steps x world_size.
            micro_size: samples per micro-batch.
            accumulation_steps: micro-batches per optimizer step and rank.
            rank: of data parallelism.
            world_size: of data parallelism.
            seed: `run.seed`.
            shuffle: a new order every epoch.
            num_workers: processes that fetch ahead; 0 fetches in this process.
            prefetch_batches: micro-batches that each worker keeps ready.
            pin_memory: copy batches into page-locked memory, for asynchronous transfer to the GPU.
            random_samples: reading a sample draws random numbers, which are then seeded per (seed, epoch, index). What
                a `collate_fn` of the dataset's own draws is seeded in any case.

        Raises:
            ConfigError: kind ``dataset-smaller-than-batch``.
        """
        self._share = Share(global_size, micro_size, accumulation_steps, rank, world_size)
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._random_samples = random_samples
        self._fetching: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers > 0:
            self._fetching["prefetch_factor"] = prefetch_batches
        self.steps_per_epoch: int = len(dataset) // global_size
        if self.steps_per_epoch == 0:
            raise ConfigError(_too_small(len(dataset), global_size=global_size))

    def stream(self, start_step: int = 0) -> Generator[Any, None, None]:
        """This rank's micro-batches from optimizer step `start_step` on, without end.

        Args:
            start_step: counted from 0 at the beginning of the run; its epoch is start_step // steps_per_epoch. Samples
                of earlier steps are not fetched.

        Returns:
            Collated batches, `accumulation_steps` for every optimizer step. Closing the generator ends the workers;
            torch's global random state is neither read nor changed.
        """
        batches = iter(self._loader(start_step))
        try:
            yield from batches
        finally:
            del batches  # the last reference: a DataLoader iterator stops its workers when it is collected

    def _loader(self, start_step: int) -> DataLoader[Any]:
        indices = MicroBatchSampler(
            len(self._dataset), share=self._share, seed=self._seed, shuffle=self._shuffle, start_step=start_step
        )
        own = own_collate(self._dataset)
        samples, is_keyed = self._dataset, self._random_samples or own is not None
        if is_keyed:
            samples = SeededSamples(samples, seed=self._seed) if self._random_samples else KeyedSamples(samples)
        return DataLoader(
            SamplesWithoutExit(SeededCollate(samples, collate=own, seed=self._seed) if own is not None else samples),
            batch_sampler=KeyedMicroBatchSampler(indices) if is_keyed else indices,
            collate_fn=as_it_is if own is not None else collate,
            worker_init_fn=init_of_workers(),
            # Without one, every iterator draws its workers' seeds from the global generator.
            generator=torch.Generator().manual_seed(mix_int(_WORKER_SALT, self._seed, self._share.rank)),
            **self._fetching,
        )


def _too_small(num_samples: int, *, global_size: int) -> Problem:
    return Problem(
        kind="dataset-smaller-than-batch",
        key="batch.global_size",
        value=global_size,
        reason=f"the training set has {num_samples} samples, so not one batch of {global_size} can be filled",
        fix=f"set batch.global_size to {num_samples} or less, or train on more data",
    )
