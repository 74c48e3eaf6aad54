"""Orders by length."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from framework.data.from_dataloader import taken_over
from framework.data.lengths import lengths_of
from framework.errors import ConfigError
from tests.data.loader_of import train_loader
from tests.data.test_streams import Numbers

SMALL = TensorDataset(torch.arange(1000, 1010))


class Lengths(TensorDataset):
    """Numbers of unequal lengths."""

    def __init__(self) -> None:
        super().__init__(torch.arange(103))
        self.lengths = [(7 * number) % 50 for number in range(103)]


def lengths(count: int, *, ranks: int = 1, start: int = 0, **options: Any) -> list[list[int]]:
    """Return the lengths of some steps of eight samples."""
    data, found = Lengths(), [list[int]() for _ in range(count)]
    for rank in range(ranks):
        sizes = {
            "global_size": 8,
            "micro_size": 2,
            "accumulation_steps": 4 // ranks,
            "rank": rank,
            "world_size": ranks,
        }
        stream = train_loader(data, **sizes, seed=1, shuffle=True, **options).stream(start)
        for step in range(count):
            found[step] += [
                data.lengths[i] for (batch,) in islice(stream, 4 // ranks) for i in batch.tolist()
            ]
        stream.close()
    return found


class TestLengths:
    def test_buckets_hold_like_lengths_and_all_samples(self) -> None:
        whole, plain = lengths(36, bucket_steps=6), lengths(36)
        spread = np.mean([max(step) - min(step) for step in whole])
        assert spread < 0.3 * np.mean([max(step) - min(step) for step in plain])
        for epoch in range(3):
            both = [
                sorted(x for step in found[12 * epoch : 12 * epoch + 12] for x in step)
                for found in (whole, plain)
            ]
            assert both[0] == both[1]
        first = [np.mean(step) for step in whole[:6]]
        assert first != sorted(first), "steps are drawn, not sorted"
        assert lengths(10, ranks=4, start=9, bucket_steps=6) == whole[9:19]

    def test_a_curriculum_begins_with_the_shortest_and_epochs_follow(self) -> None:
        whole, plain = lengths(30, curriculum_steps=10), lengths(20)
        assert max(whole[0]) < 20
        assert np.mean(whole[0]) < np.mean(whole[4]) < np.mean(whole[8])
        assert whole[10:] == plain
        assert lengths(12, ranks=2, start=6, curriculum_steps=10) == whole[6:18]
        both = lengths(30, curriculum_steps=10, bucket_steps=6)
        assert (both[:10], both[10:]) == (whole[:10], lengths(20, bucket_steps=6))

    @pytest.mark.parametrize("data", [SMALL, Numbers()])
    def test_unknown_ones_are_named(self, data: Any) -> None:
        with pytest.raises(
            ConfigError,
            match=r"data\.bucket_steps: the lengths of the training samples are not known",
        ):
            lengths_of(data, "data.bucket_steps")

    def test_a_column_has_them(self) -> None:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": [1, 2], "length": [5, 3]})
        assert lengths_of(rows.with_format("torch"), "").tolist() == [5, 3]

    def test_a_sampler_s_order_is_sorted_as_well(self) -> None:
        sampler = WeightedRandomSampler([1.0] * 103, 64)
        dataset, _ = taken_over(DataLoader(Lengths(), 8, sampler=sampler), key="", trains=True)
        sizes = {
            "global_size": 8,
            "micro_size": 8,
            "accumulation_steps": 1,
            "rank": 0,
            "world_size": 1,
        }
        stream = train_loader(dataset, **sizes, seed=1, shuffle=True, bucket_steps=8).stream()
        found = [[dataset.lengths[i] for i in batch.tolist()] for (batch,) in islice(stream, 8)]
        assert (
            sorted(max(step) for step in found[:-1])[:4] < sorted(max(step) for step in found)[-4:]
        )
        assert np.mean([max(step) - min(step) for step in found]) < 12
