"""Mixtures of datasets in fixed shares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from framework.config.load import config_from_values
from framework.data.from_dataloader import TakenSet
from framework.data.mixtures import Mixture, pattern
from framework.data.order import Share
from framework.data.streams import LanePlace, StreamLoader, StreamPlaces
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.setup.components import gather_parts, make_train_loader
from framework.setup.user_code import Objects
from tests.data.loader_of import stream_loader
from tests.data.test_streams import GLOBAL, Numbers, Stateful, steps

SMALL, LARGE = TensorDataset(torch.arange(1000, 1010)), TensorDataset(torch.arange(2000, 2500))


def taken(
    dataset: Any, count: int, *, ranks: int = 1, start: int = 0, **options: Any
) -> list[list[int]]:
    """Return the samples of some steps, all ranks' together."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank in range(ranks):
        share = Share(GLOBAL, 2, GLOBAL // ranks // 2, rank, ranks)
        stream = stream_loader(dataset, share=share, seed=3, **options).stream(start)
        for step in range(count):
            for (batch,) in islice(stream, GLOBAL // ranks // 2):
                found[step] += batch.tolist()
        stream.close()
    return found


class TestShares:
    @pytest.mark.parametrize(
        "weights",
        [(1, 1), (3, 1), (0.7, 0.3), (0.5, 0.3, 0.2), (10, 1, 1, 1), (0.9999, 0.0001), (5,)],
    )
    def test_each_has_its_share_to_within_one_sample_up_to_anywhere(
        self, weights: tuple[float, ...]
    ) -> None:
        chosen = np.tile(pattern(weights), 2)
        for number, weight in enumerate(weights):
            behind = np.cumsum(chosen == number) - weight / sum(weights) * np.arange(
                1, len(chosen) + 1
            )
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
        assert {small.count(number) for number in range(1000, 1010)} <= {29, 30, 31}, (
            "every pass over it is whole"
        )
        large = [number for step in found[:50] for number in step if number >= 2000]
        assert len(set(large)) == len(large) > 440

    @pytest.mark.slow
    def test_ranks_workers_and_a_resume_see_the_same(self) -> None:
        def mixture() -> Mixture:
            return Mixture([(1, SMALL), (2, Mixture([(1, LARGE), (1, SMALL)]))])

        whole = taken(mixture(), 12)
        assert (
            taken(mixture(), 12, ranks=3, num_workers=2) == whole == taken(mixture(), 12, ranks=2)
        )
        assert taken(mixture(), 3, ranks=2, start=7) == whole[7:10]

    @pytest.mark.slow
    def test_with_streams_it_has_their_lanes_and_states(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("framework.data.streams._TIME_OF_STATES", 0)
        pairs = [(number + 90_000_000, 0.0) for number in range(100)]

        def mixture(stream: Any) -> Mixture:
            return Mixture([(1, stream), (1, pairs)])

        source = Stateful((400,) * 6)
        whole = steps(mixture(source), 123)
        assert mixture(source).num_shards == 6
        places = StreamPlaces(lambda own: [own])
        share = Share(GLOBAL, 2, 6, 0, 1)
        places.loader = stream_loader(mixture(Stateful((400,) * 6)), share=share, seed=3)
        for _ in islice(places.loader.stream(), 120 * 6):
            pass
        places.restore(places.state(120))
        again = Stateful((400,) * 6)
        assert (
            steps(mixture(again), 3, start=120, ranks=3, places=places.restored) == whole[120:123]
        )
        assert again.read[0] < 3 * 6 * 90, "of 1,440 by each rank"
        assert steps(mixture(Numbers((50,) * 6)), 3, start=120) != whole[120:123]

    def test_what_a_stream_draws_for_its_pass_is_drawn_again_by_a_resume(self) -> None:
        class Shuffled(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return (
                    (number + int(1e6 * torch.rand(())),) for number in torch.randperm(400).tolist()
                )

        def loader(places: Any = None) -> StreamLoader:
            mixture = Mixture([(1, Shuffled()), (1, Mixture([(1, Shuffled()), (1, SMALL)]))])
            return stream_loader(
                mixture, share=Share(GLOBAL, GLOBAL, 1, 0, 1), seed=3, places=places
            )

        begun = loader()
        whole = [batch[0].tolist() for batch in islice(begun.stream(), 20)]
        assert begun.places[0].state is not None
        places = {0: LanePlace(begun.places[0].count, 0, begun.places[0].state)}
        step = -(-places[0].count // GLOBAL)
        assert [
            batch[0].tolist() for batch in islice(loader(places).stream(step), 20 - step)
        ] == whole[step:]

    def test_parts_that_make_their_batches_by_unlike_functions_are_refused(self) -> None:
        def made(*names: str) -> Any:
            return TakenSet(SMALL, partial(dict, names=names), None)

        assert Mixture([(1, made("a")), (1, made("a"))]).collate_fn.keywords == {"names": ("a",)}
        for other in (made("b"), SMALL):
            with pytest.raises(
                ConfigError, match=r"data\.parts: part 1 makes batches by .*mixture-collate"
            ):
                Mixture([(1, made("a")), (1, other)])

    def test_by_config(self) -> None:
        part = {"kind": "digits"}
        values = {
            "data": {
                "kind": "mixture",
                "parts": [
                    {"weight": 2, "data": part},
                    {"weight": 1, "data": part | {"image_size": 28}},
                ],
            },
            "batch": {"micro_size": 6},
            "training": {"max_steps": 2},
        }
        config = config_from_values(values)
        parts = gather_parts(config, Objects())
        assert len(parts.splits.evaluation) == 360
        images, labels = next(
            make_train_loader(
                make_plan(config, Cluster(device="cpu")), parts.splits, rank=0
            ).stream()
        )
        assert (tuple(images.shape), tuple(labels.shape)) == ((6, 1, 28, 28), (6,))
        one = {"data": {"kind": "mixture", "parts": [{"weight": 2, "data": part}]}}
        with pytest.raises(ConfigError, match=r"data\.parts"):
            config_from_values(one)
