from __future__ import annotations

import multiprocessing
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from framework.data.loaders import TrainLoader
from framework.errors import ConfigError
from framework.recipes.image_sets.image_tensors import ImageTensors
from tests.data.loader_of import train_loader

LAYOUT = {"global_size": 8, "micro_size": 2, "accumulation_steps": 2, "rank": 1, "world_size": 2}
NUMBERS = TensorDataset(torch.arange(29))  # three steps an epoch, five samples left out


class Dice(Dataset[Any]):
    """Counts its reads; every sample draws from all three global generators."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        self.read.append(index)
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


class Ragged(Dataset[Any]):
    """Samples of unequal length, which torch cannot stack."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> list[int]:
        return [index] * index

    def collate_fn(self, samples: list[list[int]]) -> list[int]:
        return [len(sample) for sample in samples]


def loader(dataset: Any, **changes: Any) -> TrainLoader:
    return train_loader(dataset, **{**LAYOUT, "seed": 3, "shuffle": True, **changes})


def take(loader: TrainLoader, count: int, *, start_step: int = 0) -> list[list[Any]]:
    """The first batches of a stream as plain lists, the stream closed afterwards."""
    stream = loader.stream(start_step)
    batches = [[field.tolist() for field in batch] for batch in islice(stream, count)]
    stream.close()
    return batches


def test_steps_per_epoch_leaves_the_remainder_out() -> None:
    assert loader(NUMBERS).steps_per_epoch == 3
    assert loader(TensorDataset(torch.arange(8))).steps_per_epoch == 1


def test_ranks_together_see_every_sample_of_an_epoch_at_most_once() -> None:
    seen = [
        value
        for rank in (0, 1)
        for batch in take(loader(NUMBERS, rank=rank), 6)
        for value in batch[0]
    ]
    assert len(seen) == len(set(seen)) == 24


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("start_step", [1, 2, 3, 7])
def test_resuming_at_any_step_continues_the_stream(start_step: int, num_workers: int) -> None:
    whole = take(loader(Dice(), random_samples=True), 20)
    tail = take(
        loader(Dice(), random_samples=True, num_workers=num_workers), 6, start_step=start_step
    )
    assert tail == whole[2 * start_step : 2 * start_step + 6]


def test_resuming_reads_no_sample_of_earlier_steps() -> None:
    dice = Dice()
    (batch,) = take(loader(dice), 1, start_step=10**6)
    assert dice.read == batch[0]


def test_an_epoch_draws_other_random_samples_than_the_one_before() -> None:
    batches = take(loader(Dice(), shuffle=False, random_samples=True), 12)
    first, second = batches[:6], batches[6:]
    assert [batch[0] for batch in first] == [batch[0] for batch in second]
    assert all(one[1:] != other[1:] for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("prefetch_batches", [1, 3])
def test_augmented_images_are_the_same_for_any_number_of_workers(
    prefetch_batches: int,
) -> None:
    images = torch.randint(0, 256, (29, 1, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    dataset = ImageTensors(images, torch.arange(29), mean=[0.5], std=[0.5], augment=True)
    here = take(loader(dataset, random_samples=True), 8)
    there = take(
        loader(dataset, random_samples=True, num_workers=2, prefetch_batches=prefetch_batches), 8
    )
    assert here == there


def test_random_samples_do_not_depend_on_the_number_of_ranks() -> None:
    def step(**layout: int) -> list[Any]:
        return [
            sample
            for rank in range(layout["world_size"])
            for batch in take(
                loader(Dice(), random_samples=True, rank=rank, **layout),
                layout["accumulation_steps"],
            )
            for sample in zip(*batch, strict=True)
        ]

    alone = step(micro_size=8, accumulation_steps=1, world_size=1)
    assert alone == step(micro_size=1, accumulation_steps=2, world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("random_samples", [False, True])
def test_the_global_random_state_is_neither_used_nor_changed(
    num_workers: int, random_samples: bool
) -> None:
    dataset = Dice() if random_samples else NUMBERS
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        batches.append(
            take(loader(dataset, num_workers=num_workers, random_samples=random_samples), 8)
        )
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert batches[0] == batches[1]


def test_workers_live_through_epochs_and_end_with_the_stream() -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    stream = loader(NUMBERS, num_workers=2).stream()
    next(stream)
    workers = {process.pid for process in multiprocessing.active_children()} - before
    for _ in range(20):  # three epochs
        next(stream)
    assert {process.pid for process in multiprocessing.active_children()} - before == workers
    assert len(workers) == 2
    stream.close()
    assert {process.pid for process in multiprocessing.active_children()} <= before


def test_a_dataset_s_own_collate_fn_makes_the_batches() -> None:
    for random_samples in (False, True):
        batches = list(
            islice(loader(Ragged(), shuffle=False, random_samples=random_samples).stream(), 4)
        )
        assert batches == [[4, 5], [6, 7], [12, 13], [14, 15]]


class Hiding(Dataset[Any]):
    """Its batches draw from all three generators while they are put together."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.rand(len(samples)) + float(np.random.rand()) + random.random()
        return torch.tensor(samples), drawn


@pytest.mark.parametrize("random_samples", [False, True])
def test_what_a_collate_fn_draws_is_the_same_in_every_process(random_samples: bool) -> None:
    batches = []
    for seed in (1, 2):  # two stages of a pipeline, whose generators differ
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        batches.append(take(loader(Hiding(), random_samples=random_samples), 8))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("random_samples", [False, True])
def test_what_a_collate_fn_draws_goes_on_at_a_resume_with_any_number_of_workers(
    random_samples: bool,
) -> None:
    whole = take(loader(Hiding(), random_samples=random_samples, shuffle=False), 14)
    assert len({tuple(drawn) for _, drawn in whole}) == 14  # other draws in the next epoch as well
    there = loader(Hiding(), random_samples=random_samples, shuffle=False, num_workers=2)
    assert take(there, 4, start_step=5) == whole[10:]


def test_a_dataset_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(TensorDataset(torch.arange(7)))
    assert str(caught.value) == (
        "batch.global_size = 8: the training set has 7 samples, so not one batch of 8 can be filled; "
        "set batch.global_size to 7 or less, or train on more data [dataset-smaller-than-batch]"
    )
