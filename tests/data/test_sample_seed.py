from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from framework.data.batches import WholeBatch
from framework.data.image_sets import ImageTensors
from framework.data.sample_seed import SeededBatches, SeededSamples, random_state_kept, seed_generators


class Dice(Dataset[Any]):
    """Every sample draws from all three global generators."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if index == 66:
            raise RuntimeError("this sample is damaged")
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_sample_depends_on_seed_epoch_and_index_only() -> None:
    dice = SeededSamples(Dice(), seed=1)
    together = dice.__getitems__([(0, 3), (0, 4), (2, 3)])
    assert dice.__getitems__([(2, 3)]) == [together[2]]
    assert dice.__getitems__([(0, 4), (0, 3)]) == [together[1], together[0]]
    others = SeededSamples(Dice(), seed=2).__getitems__([(0, 3)])
    for column in (1, 2, 3):
        values = [sample[column] for sample in (*together, *others)]
        assert len(set(values)) == 4


@pytest.mark.parametrize(
    "read",
    [
        lambda: SeededSamples(Dice(), seed=1).__getitems__([(0, 1), (1, 2)]),
        lambda: SeededBatches(Dice()).__getitems__([1, 2]),
    ],
)
def test_the_surrounding_random_state_is_untouched(read: Any) -> None:
    seed_generators(11)
    expected = [draws(), draws()]
    seed_generators(11)
    found = [draws()]
    read()
    found.append(draws())
    assert found == expected


def test_the_surrounding_random_state_survives_a_damaged_sample() -> None:
    seed_generators(11)
    expected = draws()
    seed_generators(11)
    with pytest.raises(RuntimeError, match="damaged"):
        SeededSamples(Dice(), seed=1).__getitems__([(0, 66)])
    assert draws() == expected


def test_state_is_given_back() -> None:
    seed_generators(3)
    with random_state_kept():
        first = draws()
    assert draws() == first


def test_image_tensors_take_the_seeds_without_touching_any_generator() -> None:
    images = torch.randint(0, 256, (20, 1, 8, 8)).byte()
    dataset = ImageTensors(images, torch.arange(20), mean=[0.5], std=[0.5], augment=True)
    seeded = SeededSamples(dataset, seed=4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batch = seeded.__getitems__([(1, index) for index in range(20)])
    assert isinstance(batch, WholeBatch)
    assert torch.equal(torch.get_rng_state(), before)
    reordered = seeded.__getitems__([(1, index) for index in range(19, -1, -1)])
    assert torch.equal(reordered.fields[0].flip(0), batch.fields[0])
    assert not torch.equal(seeded.__getitems__([(2, index) for index in range(20)]).fields[0], batch.fields[0])


def test_an_evaluation_batch_draws_the_same_every_time_and_keeps_a_dataset_s_fast_path() -> None:
    class Fast(Dice):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return ["fast", draws(), *indices]

    batches = SeededBatches(Fast())
    assert batches.__getitems__([4, 5]) == batches.__getitems__([4, 5])
    assert batches.__getitems__([4, 5])[0] == "fast"
    assert batches.__getitems__([6, 7])[1] != batches.__getitems__([4, 5])[1]
    assert [sample[0] for sample in SeededBatches(Dice()).__getitems__([4, 5])] == [4, 5]
