"""Mixtures of datasets in fixed shares, and orders by length."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from framework.config.load import config_from_values
from framework.data.lengths import lengths_of
from framework.data.loaders import TrainLoader
from framework.data.mixtures import Mixture, pattern
from framework.data.order import Share
from framework.data.streams import StreamLoader, StreamPlaces
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.setup.objects import Objects
from framework.setup.parts import gather_parts, make_train_loader
from tests.data.test_streams import GLOBAL, Numbers, Stateful, steps

SMALL, LARGE = TensorDataset(torch.arange(1000, 1010)), TensorDataset(torch.arange(2000, 2500))


def taken(dataset: Any, count: int, *, ranks: int = 1, start: int = 0, **options: Any) -> list[list[int]]:
    """The samples of so many steps, all ranks' together."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank in range(ranks):
        share = Share(GLOBAL, 2, GLOBAL // ranks // 2, rank, ranks)
        stream = StreamLoader(dataset, share=share, seed=3, **options).stream(start)
        for step in range(count):
            for (batch,) in islice(stream, GLOBAL // ranks // 2):
                found[step] += batch.tolist()
        stream.close()
    return found


class TestShares:
    @pytest.mark.parametrize(
        "weights", [(1, 1), (3, 1), (0.7, 0.3), (0.5, 0.3, 0.2), (10, 1, 1, 1), (0.9999, 0.0001), (5,)]
    )
    def test_each_has_its_share_to_within_one_sample_up_to_anywhere(self, weights: tuple[float, ...]) -> None:
        chosen = np.tile(pattern(weights), 2)
        for number, weight in enumerate(weights):
            behind = np.cumsum(chosen == number) - weight / sum(weights) * np.arange(1, len(chosen) + 1)
            assert np.abs(behind).max() < 1 + 1e-6

    def test_a_share_of_nothing_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"a part would never be read.*mixture-weights"):
            pattern((1.0, 1e-6))


class TestMixture:
    PARTS = ((1, SMALL), (3, LARGE))

    def test_steps_hold_the_shares_and_a_small_part_begins_anew(self) -> None:
        found = taken(Mixture(self.PARTS), 100)
        small = [number for step in found for number in step if number < 2000]
        assert 295 <= len(small) <= 305
        assert all(abs(sum(number < 2000 for number in step) - 3) <= 1 for step in found)
        assert {small.count(number) for number in range(1000, 1010)} <= {29, 30, 31}, "every pass over it is whole"
        large = [number for step in found[:50] for number in step if number >= 2000]
        assert len(set(large)) == len(large) > 440

    def test_ranks_workers_and_a_resume_see_the_same(self) -> None:
        def mixture() -> Mixture:
            return Mixture([(1, SMALL), (2, Mixture([(1, LARGE), (1, SMALL)]))])

        whole = taken(mixture(), 12)
        assert taken(mixture(), 12, ranks=3, num_workers=2) == whole == taken(mixture(), 12, ranks=2)
        assert taken(mixture(), 3, ranks=2, start=7) == whole[7:10]

    def test_with_streams_it_has_their_lanes_and_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("framework.data.streams._TIME_OF_STATES", 0)
        pairs = [(number + 90_000_000, 0.0) for number in range(100)]

        def mixture(stream: Any) -> Mixture:
            return Mixture([(1, stream), (1, pairs)])

        source = Stateful((400,) * 6)
        whole = steps(mixture(source), 123)
        assert mixture(source).num_shards == 6
        places = StreamPlaces(lambda own: [own])
        share = Share(GLOBAL, 2, 6, 0, 1)
        places.loader = StreamLoader(mixture(Stateful((400,) * 6)), share=share, seed=3)
        for _ in islice(places.loader.stream(), 120 * 6):
            pass
        places.restore(places.state(120))
        again = Stateful((400,) * 6)
        assert steps(mixture(again), 3, start=120, ranks=3, places=places.found) == whole[120:123]
        assert again.read[0] < 3 * 6 * 90, "of 1,440 by each rank"
        assert steps(mixture(Numbers((50,) * 6)), 3, start=120) != whole[120:123]

    def test_by_config(self) -> None:
        part = {"kind": "digits"}
        values = {
            "data": {
                "kind": "mixture",
                "parts": [{"weight": 2, "data": part}, {"weight": 1, "data": part | {"image_size": 28}}],
            },
            "batch": {"micro_size": 6},
            "training": {"max_steps": 2},
        }
        config = config_from_values(values)
        parts = gather_parts(config, Objects())
        assert len(parts.splits.evaluation) == 360
        images, labels = next(make_train_loader(make_plan(config, Cluster()), parts.splits, rank=0).stream())
        assert (tuple(images.shape), tuple(labels.shape)) == ((6, 1, 28, 28), (6,))
        one = {"data": {"kind": "mixture", "parts": [{"weight": 2, "data": part}]}}
        with pytest.raises(ConfigError, match=r"data\.parts"):
            config_from_values(one)


class Lengths(TensorDataset):
    """Numbers of unequal lengths."""

    def __init__(self) -> None:
        super().__init__(torch.arange(103))
        self.lengths = [(7 * number) % 50 for number in range(103)]


def lengths(count: int, *, ranks: int = 1, start: int = 0, **options: Any) -> list[list[int]]:
    """The lengths of so many steps of eight samples."""
    data, found = Lengths(), [list[int]() for _ in range(count)]
    for rank in range(ranks):
        sizes = {"global_size": 8, "micro_size": 2, "accumulation_steps": 4 // ranks, "rank": rank, "world_size": ranks}
        stream = TrainLoader(data, **sizes, seed=1, shuffle=True, **options).stream(start)
        for step in range(count):
            found[step] += [data.lengths[i] for (batch,) in islice(stream, 4 // ranks) for i in batch.tolist()]
        stream.close()
    return found


class TestLengths:
    def test_buckets_hold_like_lengths_and_all_samples(self) -> None:
        whole, plain = lengths(36, bucket_steps=6), lengths(36)
        spread = np.mean([max(step) - min(step) for step in whole])
        assert spread < 0.3 * np.mean([max(step) - min(step) for step in plain])
        for epoch in range(3):
            both = [sorted(x for step in found[12 * epoch : 12 * epoch + 12] for x in step) for found in (whole, plain)]
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
        with pytest.raises(ConfigError, match=r"data\.bucket_steps: the lengths of the training samples are not known"):
            lengths_of(data, "data.bucket_steps")

    def test_a_column_has_them(self) -> None:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": [1, 2], "length": [5, 3]})
        assert lengths_of(rows.with_format("torch"), "").tolist() == [5, 3]
