from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from framework.data.loaders import EvalLoader, rank_batches


class Dice(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_sample_counts_once_in_equally_many_batches_per_rank(
    num_samples: int, batch: int, world: int
) -> None:
    ranks = [
        rank_batches(num_samples, batch_size=batch, rank=rank, world_size=world)
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    counted = Counter(
        index for batches in ranks for indices, counts in batches if counts for index in indices
    )
    assert counted == Counter(range(num_samples))
    for indices, _ in (pair for batches in ranks for pair in batches):
        assert 1 <= len(indices) <= batch
        assert set(indices) <= set(range(num_samples))


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_no_more_batches_than_needed(num_samples: int, batch: int, world: int) -> None:
    batches = rank_batches(num_samples, batch_size=batch, rank=0, world_size=world)
    assert (len(batches) - 1) * batch * world < num_samples + world
    assert len(batches) * batch * world >= num_samples


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("num_samples", "world_size"), [(11, 2), (3, 4), (1, 3)])
def test_the_exact_mean_comes_out_of_the_counted_batches(
    num_samples: int, world_size: int, num_workers: int
) -> None:
    values = torch.arange(num_samples).double() ** 2
    total, count = 0.0, 0
    for rank in range(world_size):
        loader = EvalLoader(
            TensorDataset(values),
            batch_size=2,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
        )
        batches = list(loader)
        assert len(batches) == len(loader)
        for (batch,), counts in batches:
            if counts:
                total, count = total + batch.sum().item(), count + len(batch)
    assert count == num_samples
    assert total / count == pytest.approx(values.mean().item(), rel=1e-15)


def test_a_rank_without_samples_repeats_real_ones_as_padding() -> None:
    loader = EvalLoader(TensorDataset(torch.arange(2)), batch_size=4, rank=0, world_size=3)
    (((batch,), counts),) = list(loader)
    assert (batch.tolist(), counts) == ([0, 1], False)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_samples_repeat_in_every_pass_and_the_global_state_is_untouched(
    num_workers: int,
) -> None:
    loader = EvalLoader(Dice(), batch_size=4, rank=0, world_size=1, num_workers=num_workers)
    passes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        passes.append([[field.tolist() for field in batch] for batch, _ in loader])
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert passes[0] == passes[1]
    in_this_process = EvalLoader(Dice(), batch_size=4, rank=0, world_size=1)
    assert [[field.tolist() for field in batch] for batch, _ in in_this_process] == passes[0]


def test_a_dataset_s_own_collate_fn_makes_the_batches() -> None:
    class Ragged(Dice):
        def collate_fn(self, samples: list[Any]) -> str:
            return "+".join(str(sample[0]) for sample in samples)

    loader = EvalLoader(Ragged(), batch_size=4, rank=0, world_size=1)
    assert [batch for batch, _ in loader] == ["0+1+2+3", "4+5+6+7", "8+9+10"]


@pytest.mark.parametrize(("batch_size", "world_size"), [(3, 1), (2, 3), (4, 2)])
def test_the_first_samples_for_any_layout(batch_size: int, world_size: int) -> None:
    def seen(max_samples: int) -> list[int]:
        loaders = [
            EvalLoader(
                TensorDataset(torch.arange(11)),
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                max_samples=max_samples,
            )
            for rank in range(world_size)
        ]
        assert len({len(loader) for loader in loaders}) == 1
        return sorted(
            i for loader in loaders for (batch,), counts in loader if counts for i in batch.tolist()
        )

    assert seen(5) == list(range(5))
    assert seen(1) == [0]
    assert seen(100) == list(range(11))


class Hiding(Dataset[Any]):
    """Its batches draw from all three generators while they are put together."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, samples: list[int]) -> list[float]:
        return [*samples, torch.rand(()).item(), float(np.random.rand()), random.random()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_collate_fn_draws_is_the_same_in_every_pass(num_workers: int) -> None:
    torch.manual_seed(1)
    here = list(EvalLoader(Hiding(), batch_size=2, rank=0, world_size=2))
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert (
        list(EvalLoader(Hiding(), batch_size=2, rank=0, world_size=2, num_workers=num_workers))
        == here
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


class Processes(Dataset[int]):
    """Each sample is the number of the process that reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_stay_for_the_next_evaluation_also_after_one_that_was_stopped() -> None:
    loader = EvalLoader(Processes(), batch_size=2, rank=0, world_size=1, num_workers=2)
    first = {int(process) for batch, _ in loader for process in batch}
    assert os.getpid() not in first
    for _ in loader:
        break
    assert {int(process) for batch, _ in loader for process in batch} == first
