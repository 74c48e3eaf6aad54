from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from framework.data import batches
from framework.data.batches import (
    SeededBatches,
    SeededSamples,
    WholeBatch,
    collate,
    random_state_kept,
    seed_generators,
)
from framework.data.order import mix
from framework.recipes.image_sets.image_tensors import ImageTensors


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
    assert not torch.equal(
        seeded.__getitems__([(2, index) for index in range(20)]).fields[0], batch.fields[0]
    )


def test_an_evaluation_batch_draws_the_same_every_time_and_keeps_a_dataset_s_fast_path() -> None:
    class Fast(Dice):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return ["fast", draws(), *indices]

    batches = SeededBatches(Fast())
    assert batches.__getitems__([4, 5]) == batches.__getitems__([4, 5])
    assert batches.__getitems__([4, 5])[0] == "fast"
    assert batches.__getitems__([6, 7])[1] != batches.__getitems__([4, 5])[1]
    assert [sample[0] for sample in SeededBatches(Dice()).__getitems__([4, 5])] == [4, 5]


class Counting(Dataset[Any]):
    """Draws nothing, or from one generator for some samples; counts its reads."""

    def __init__(self, draw: Any = None, *, draws_at: int = 0) -> None:
        self.reads, self._draw, self._at = 0, draw, draws_at

    def __getitem__(self, index: int) -> tuple[int, Any]:
        self.reads += 1
        return index, self._draw() if self._draw is not None and index >= self._at else None


def keys(*indices: int) -> list[tuple[int, int]]:
    return [(0, index) for index in indices]


def test_a_dataset_that_draws_nothing_is_read_once_and_not_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "seed_generators", None)
    dataset = Counting()
    samples = SeededSamples(dataset, seed=1)
    assert [samples.__getitems__(keys(1, 2)), samples.__getitems__(keys(7))] == [
        [(1, None), (2, None)],
        [(7, None)],
    ]
    assert dataset.reads == 3


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()).item(), lambda: float(np.random.rand()), random.random]
)
def test_a_dataset_that_draws_late_is_seeded_from_there_on(draw: Any) -> None:
    expected = dict(seeded_by_hand(draw, indices=[60, 61, 70]))
    dataset = Counting(draw, draws_at=60)
    samples = SeededSamples(dataset, seed=1)
    assert samples.__getitems__(keys(1, 2)) == [(1, None), (2, None)]
    assert samples.__getitems__(keys(59, 60, 61)) == [
        (59, None),
        (60, expected[60]),
        (61, expected[61]),
    ]
    assert samples.__getitems__(keys(70)) == [(70, expected[70])]
    assert dataset.reads == 2 + 2 * 3 + 1, (
        "a batch is read twice only where the first draw is found"
    )


def seeded_by_hand(draw: Any, *, indices: list[int]) -> list[tuple[int, Any]]:
    found = []
    for index in indices:
        with random_state_kept():
            seed_generators(int(mix(0x5A3B, 1, 0, np.array([index]))[0]))
            found.append((index, draw()))
    return found


def test_an_error_that_depends_on_a_draw_is_the_seeded_one() -> None:
    def draw() -> float:
        raise RuntimeError(f"drew {torch.rand(()).item()}")

    stated = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            SeededSamples(Counting(draw), seed=1).__getitems__(keys(3))
        stated.append(str(caught.value))
        torch.rand(())
    assert stated[0] == stated[1]


def test_tensors_are_read_as_a_whole_batch() -> None:
    tensors = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    for part in (Subset(Subset(tensors, [9, 7, 5, 3]), [2, 0]), Subset(tensors, [-1, 3])):
        for seed in (1, None):
            batch = collate(SeededSamples(part, seed=seed, in_one=True).__getitems__(keys(1, 0, 1)))
            expected = collate([part[1], part[0], part[1]])
            assert all(torch.equal(own, other) for own, other in zip(batch, expected, strict=True))
        assert isinstance(SeededSamples(part, seed=1).__getitems__(keys(1)), list)


def test_no_generator_is_watched_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("framework.data.batches._GeneratorStates")
    part = Subset(TensorDataset(torch.arange(10)), range(10))
    assert SeededSamples(part, seed=1, in_one=True).__getitems__(keys(3)).fields[0].tolist() == [3]


def test_the_second_of_two_normals_is_a_draw() -> None:
    """numpy makes two at once and keeps one: it is given away and no generator moves."""
    np.random.seed(0)
    np.random.randn()
    samples = SeededSamples(Counting(lambda: float(np.random.randn())), seed=1).__getitems__(
        keys(4, 5)
    )
    assert samples == seeded_by_hand(lambda: float(np.random.randn()), indices=[4, 5])
