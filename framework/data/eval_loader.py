"""The evaluation data of one rank: every sample counted once over all ranks, in equally many batches on each."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from framework.data.batches import collate, own_collate
from framework.data.sample_seed import SamplesWithoutExit, SeededBatches, SeededCollate, as_it_is
from framework.data.worker_process import init_of_workers

_WORKER_SEED: Final = 0
_EVALUATION_SEED: Final = 0xE7A2  # of what a `collate_fn` draws; `run.seed` is for training


class EvalLoader:
    """Batches of one rank as (batch, counts).

    Where `counts` is False the batch is padding: real samples, repeated only because under ZeRO-3 a forward pass is
    collective and every rank must make equally many. Its results must not enter a metric.
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
    ) -> None:
        """Divide the dataset; nothing is read yet.

        Args:
            dataset: map-style, not empty; its `collate_fn`, if it has one, makes the batches.
            batch_size: samples per batch; a rank's last real batch may have fewer.
            rank: of data parallelism.
            world_size: of data parallelism.
            max_samples: take this many at most, over all ranks, the first ones; None: all.
            num_workers: processes that fetch ahead; they live for one iteration.
            pin_memory: copy batches into page-locked memory.
        """
        self._dataset = dataset
        num_samples = min(len(dataset), max_samples or len(dataset))
        self._batches = rank_batches(num_samples, batch_size=batch_size, rank=rank, world_size=world_size)
        self._fetching: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return len(self._batches)

    def __iter__(self) -> Generator[tuple[Any, bool], None, None]:
        """One pass. The global random state is left as it was; what samples and batches draw is the same in every
        pass.
        """
        own, samples = own_collate(self._dataset), SeededBatches(self._dataset)
        loader = DataLoader(
            SamplesWithoutExit(
                SeededCollate(samples, collate=own, seed=_EVALUATION_SEED) if own is not None else samples
            ),
            batch_sampler=[list(indices) for indices, _ in self._batches],
            collate_fn=as_it_is if own is not None else collate,
            worker_init_fn=init_of_workers(),
            # Without one, every iterator draws its workers' seeds from the global generator.
            generator=torch.Generator().manual_seed(_WORKER_SEED),
            **self._fetching,
        )
        for batch, (_, counts) in zip(loader, self._batches, strict=True):
            yield batch, counts


def rank_batches(num_samples: int, *, batch_size: int, rank: int, world_size: int) -> list[tuple[range, bool]]:
    """The sample numbers of a rank's batches, and whether each counts.

    Args:
        num_samples: N, at least 1.
        batch_size: samples per batch.
        rank: from 0 to world_size - 1.
        world_size: number of ranks.

    Returns:
        ceil(ceil(N / world_size) / batch_size) pairs. Rank r counts the samples from floor(N r / world_size) up to
        floor(N (r + 1) / world_size). Their number differs by at most one between ranks: at most one batch is padding.
    """
    own = range(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)
    batches = [(own[start : start + batch_size], True) for start in range(0, len(own), batch_size)]
    most_samples = -(-num_samples // world_size)
    num_padding = -(-most_samples // batch_size) - len(batches)
    return batches + [(range(min(batch_size, num_samples)), False)] * num_padding
