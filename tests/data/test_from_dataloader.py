"""A `DataLoader` handed over: what is taken of it, and an own sampler's order at every number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from framework.data.from_dataloader import TakenSet, as_tensors, taken_over
from framework.data.loaders import EvalLoader, is_stream, num_samples_of
from framework.data.splits import given_splits
from framework.data.streams import StreamEvalLoader
from framework.errors import ConfigError
from framework.setup.handed_over import config_with_objects
from framework.setup.user_code import Objects
from tests.data.loader_of import train_loader

NUMBERS = TensorDataset(torch.arange(40), torch.arange(40) % 2)


def summed(samples: Any) -> Any:
    return [int(number) for number, _ in samples]


class Growing(Sampler[int]):
    """An order that differs between epochs, as `set_epoch` says, in length if it is asked to."""

    epoch = 0

    def __init__(self, grows: int = 0) -> None:
        self.grows = grows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + number) % 40 for number in range(len(self))])

    def __len__(self) -> int:
        return 16 + self.grows * self.epoch


def steps(
    dataset: Any, count: int, *, ranks: int = 1, start: int = 0, micro: int = 4
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for rank in range(ranks):
        accumulation = 8 // ranks // micro
        loader = train_loader(
            dataset,
            global_size=8,
            micro_size=micro,
            accumulation_steps=accumulation,
            rank=rank,
            world_size=ranks,
            seed=3,
            shuffle=False,
        )
        stream = loader.stream(start)
        for step in range(count):
            for batch in islice(stream, accumulation):
                found[step] += (
                    batch[0].tolist()
                    if isinstance(batch, list) and torch.is_tensor(batch[0])
                    else batch
                )
    return found


class TestTaken:
    @pytest.mark.parametrize(
        ("loader", "taken"),
        [
            (DataLoader(NUMBERS, batch_size=4), {"micro_size": 4, "shuffle": False}),
            (
                DataLoader(NUMBERS, 4, shuffle=True, num_workers=2),
                {"micro_size": 4, "shuffle": True, "num_workers": 2},
            ),
            (
                DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 2, 1)),
                {"micro_size": 4, "shuffle": True},
            ),
            (
                DataLoader(
                    NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 5, True)
                ),
                {"micro_size": 5, "shuffle": False},
            ),
        ],
    )
    def test_batches_workers_and_shuffling(self, loader: Any, taken: dict[str, Any]) -> None:
        dataset, found = taken_over(loader, key="train_data", trains=True)
        assert found == {"num_workers": 0} | taken
        assert dataset is NUMBERS

    def test_sections_that_state_nothing_take_its_sizes(self) -> None:
        handed = Objects(
            train_data=DataLoader(NUMBERS, 4, shuffle=True, num_workers=2),
            eval_data=DataLoader(NUMBERS, 10),
            model=torch.nn.Linear(1, 2),
        )
        config = config_with_objects({}, handed)
        assert (config.batch.micro_size, config.evaluation.batch_size) == (4, 10)
        assert (config.data.num_workers, config.data.shuffle) == (2, True)
        assert config_with_objects(config, handed) == config
        stated = {
            "batch": {"micro_size": 2},
            "data": {"num_workers": 0},
            "evaluation": {"batch_size": 3},
        }
        config = config_with_objects(stated, handed)
        assert (config.batch.micro_size, config.evaluation.batch_size, config.data.num_workers) == (
            2,
            3,
            0,
        )
        both = config_with_objects({"batch": {"global_size": 8, "accumulation_steps": 4}}, handed)
        assert both.batch.micro_size is None

    def test_its_collate_fn_makes_the_batches(self) -> None:
        dataset, _ = taken_over(
            DataLoader(NUMBERS, 4, collate_fn=summed), key="train_data", trains=True
        )
        assert steps(dataset, 2, ranks=2) == [[*range(8)], [*range(8, 16)]]
        assert dataset.tensors is NUMBERS.tensors, "what else the dataset has is there"
        measured = EvalLoader(dataset, batch_size=15, rank=0, world_size=1)
        assert [len(batch) for batch, _ in measured] == [15, 15, 10]

    def test_a_stream_keeps_its_own(self) -> None:
        class Lines(IterableDataset[Any]):
            num_shards = 3

            def shard(self, num_shards: int, index: int) -> list[Any]:
                return [*self][index::num_shards]

            def __iter__(self) -> Iterator[Any]:
                return ((number, 0) for number in range(9))

        splits = given_splits(
            DataLoader(Lines(), 2, collate_fn=summed), DataLoader(Lines(), 2, collate_fn=summed)
        )
        assert is_stream(splits.train)
        assert splits.train.num_shards == 3
        loader = StreamEvalLoader(
            splits.evaluation, batch_size=9, rank=0, world_size=1, gather=lambda one: [one]
        )
        assert [batch for batch, _ in loader] == [[*range(9)]]
        assert splits.taken == {"num_workers": 0, "micro_size": 2, "eval_size": 2}

    def test_one_of_ready_batches_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match="train_data = DataLoader: its dataset makes the batches; give it"
        ):
            given_splits(DataLoader(NUMBERS, batch_size=None))

    def test_a_stateful_one_is_taken_apart_as_well(self) -> None:
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        splits = given_splits(stateful(NUMBERS, batch_size=4, shuffle=True))
        assert splits.train is NUMBERS
        assert splits.taken == {"num_workers": 0, "micro_size": 4, "shuffle": True}

    def test_rows_of_hugging_face_become_tensors(self) -> None:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]], "y": [0, 1]})
        assert torch.equal(as_tensors(rows)[1]["x"], torch.tensor([3, 4]))
        assert torch.equal(
            next(iter(as_tensors(rows.to_iterable_dataset())))["x"], torch.tensor([1, 2])
        )
        own = rows.with_format("numpy")
        assert as_tensors(own) is own
        assert given_splits((rows, DataLoader(rows, 1))).num_train == 2


class TestSamplers:
    @pytest.mark.parametrize(
        "sampler",
        [
            WeightedRandomSampler([1.0, 2.0] * 20, 24),
            WeightedRandomSampler([1.0, 2.0] * 20, 24, generator=torch.Generator().manual_seed(8)),
            SubsetRandomSampler(range(5, 31)),
            RandomSampler(NUMBERS, replacement=True, num_samples=30),
            Growing(),
        ],
        ids=["weighted", "weighted-own-generator", "subset", "replacement", "set-epoch"],
    )
    def test_an_epoch_is_its_order_for_any_ranks_and_any_beginning(self, sampler: Any) -> None:
        dataset, _ = taken_over(DataLoader(NUMBERS, 4, sampler=sampler), key="", trains=True)
        whole = steps(dataset, 10)
        assert steps(dataset, 10, ranks=2) == whole == steps(dataset, 10, micro=1, ranks=4)
        assert steps(dataset, 4, start=5, ranks=2) == whole[5:9]
        per_epoch = len(sampler) // 8
        assert whole[:per_epoch] != whole[per_epoch : 2 * per_epoch], (
            "epochs have orders of their own"
        )

    @pytest.mark.parametrize(
        ("sampler", "line"),
        [
            (Growing(grows=1), "epoch 1 has 17 samples of 40, and the first one 16"),
            ([38, 39, 40, 41] * 4, "has 16 samples of 40"),
        ],
    )
    def test_other_orders_are_named(self, sampler: Any, line: str) -> None:
        dataset = TakenSet(NUMBERS, None, sampler)
        with pytest.raises(ConfigError, match=r"\[sampler-order\]") as caught:
            steps(dataset, 3)
        assert line in str(caught.value)

    def test_an_empty_one_has_no_samples(self) -> None:
        dataset, _ = taken_over(DataLoader(NUMBERS, 4, sampler=[]), key="data", trains=True)
        assert num_samples_of(dataset) == 0
        with pytest.raises(ConfigError, match=r"0 samples.*\[dataset-smaller-than-batch\]"):
            steps(dataset, 1)
        chosen, _ = taken_over(DataLoader(NUMBERS, 4, sampler=[]), key="data", trains=False)
        assert len(chosen) == 0

    def test_in_evaluation_it_chooses_the_samples(self) -> None:
        dataset, _ = taken_over(DataLoader(NUMBERS, 4, sampler=[3, 5, 9]), key="", trains=False)
        assert [int(dataset[number][0]) for number in range(len(dataset))] == [3, 5, 9]

    def test_in_evaluation_all_ranks_choose_alike(self) -> None:
        found = [
            taken_over(
                DataLoader(NUMBERS, 4, sampler=SubsetRandomSampler(range(30))),
                key="eval_data",
                trains=False,
            )[0]
            for _ in range(2)
        ]
        assert found[0].indices == found[1].indices != sorted(found[0].indices) == [*range(30)]

    @pytest.mark.parametrize("trains", [True, False])
    def test_an_order_of_each_rank_s_own_is_refused(self, trains: bool) -> None:
        class Weighted(DistributedSampler[Any]):
            def __iter__(self) -> Iterator[int]:
                return iter([self.rank] * len(self))

        with pytest.raises(
            ConfigError,
            match=r"its sampler, Weighted, has an order of each rank's own.*loader-not-t",
        ):
            taken_over(
                DataLoader(NUMBERS, 4, sampler=Weighted(NUMBERS, 2, 1)), key="data", trains=trains
            )
        dataset, _ = taken_over(
            DataLoader(NUMBERS, 4, sampler=Weighted(NUMBERS, 1, 0)), key="data", trains=True
        )
        assert steps(dataset, 1) == [[0] * 8], "of one rank it is an order like any"


class Bucketed:
    """Batches of neighbours, in an order drawn anew for every epoch."""

    def __init__(self, size: int = 4, draw: Any = torch.randperm, tail: int = 0) -> None:
        self.size = size
        self.draw = draw
        self.tail = tail

    def __iter__(self) -> Iterator[list[int]]:
        for first in self.draw(40 // self.size).tolist():
            yield [*range(first * self.size, (first + 1) * self.size)]
        if self.tail:
            yield [*range(self.tail)]


class Inner(BatchSampler):
    """A subclass, whose sampler is seeded as one that stands alone."""

    def __iter__(self) -> Iterator[list[int]]:
        return reversed([*super().__iter__()])


class TestBatchSamplers:
    @pytest.mark.parametrize(
        "sampler",
        [
            Bucketed(),
            Bucketed(tail=3),
            Inner(RandomSampler(NUMBERS, generator=torch.Generator()), 4, drop_last=True),
            Inner(Growing(), 4, drop_last=True),
        ],
        ids=["bucketed", "short-tail", "own-generator", "set-epoch"],
    )
    def test_its_batches_are_the_micro_batches_on_any_ranks(self, sampler: Any) -> None:
        loader = DataLoader(NUMBERS, batch_sampler=sampler)
        dataset, taken = taken_over(loader, key="", trains=True)
        assert taken == {"num_workers": 0, "micro_size": 4}
        whole = steps(dataset, 10)
        assert steps(dataset, 10, ranks=2) == whole
        assert steps(dataset, 4, start=5, ranks=2) == whole[5:9]
        per_epoch = dataset.num_ordered // 8
        assert whole[:per_epoch] != whole[per_epoch : 2 * per_epoch]
        if isinstance(sampler, Bucketed):
            assert sorted(chain(*whole[:5])) == [*range(40)]
            for step in whole:
                for batch in (step[:4], step[4:]):
                    assert batch == [*range(batch[0], batch[0] + 4)]

    def test_sections_that_state_nothing_take_its_size(self) -> None:
        handed = Objects(
            train_data=DataLoader(NUMBERS, batch_sampler=Bucketed(8)), model=torch.nn.Linear(1, 2)
        )
        assert config_with_objects({}, handed).batch.micro_size == 8

    def test_in_evaluation_all_samples_of_its_batches_are_read_by_its_collate_fn(self) -> None:
        def numbers(samples: list[Any]) -> list[int]:
            return [int(sample[0]) for sample in samples]

        loader = DataLoader(NUMBERS, batch_sampler=[[3, 5], [9, 8, 7], [1]], collate_fn=numbers)
        splits = given_splits(NUMBERS, loader)
        assert splits.taken["eval_size"] == 2
        batches = EvalLoader(splits.evaluation, batch_size=2, rank=0, world_size=1)
        assert [batch for batch, _ in batches] == [[3, 5], [9, 8], [7, 1]]

    @pytest.mark.parametrize(
        ("sampler", "line"),
        [
            ([[0, 1], [2], [3, 4]], "it makes batches of 2 and of 1 samples; let all have one"),
            (Bucketed(draw=np.random.default_rng(3).permutation), "it cannot be resumed; draw"),
            ([], "it makes no batch"),
            ([["a", "b"]], "it makes the batch ['a', 'b']; let every batch be a list of numbers"),
            ([[(1, 2)]], "it makes the batch [(1, 2)]"),
        ],
    )
    def test_what_cannot_be_resumed_is_refused(self, sampler: Any, line: str) -> None:
        with pytest.raises(ConfigError, match=r"\[sampler-order\]") as caught:
            given_splits(DataLoader(NUMBERS, batch_sampler=sampler))
        assert line in str(caught.value)

    def test_other_micro_batches_are_refused(self) -> None:
        dataset = given_splits(DataLoader(NUMBERS, batch_sampler=Bucketed())).train
        dataset.check_kept(micro_size=4, by_length={"data.bucket_steps": 0})
        for micro_size, steps, line in (
            (8, 0, "set batch.micro_size: 4"),
            ("measured", 0, "batch.micro_size = measured: .* set batch.micro_size: 4"),
            (4, 2, "data.bucket_steps = 2: the data's Bucketed makes batches of 4, which"),
        ):
            with pytest.raises(ConfigError, match=line):
                dataset.check_kept(micro_size=micro_size, by_length={"data.bucket_steps": steps})


def test_a_function_that_begins_workers_is_named_and_of_a_stream_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    taken_over(
        DataLoader(NUMBERS, batch_size=4, num_workers=1, worker_init_fn=print),
        key="train_data",
        trains=True,
    )
    assert "train_data: the DataLoader's worker_init_fn is not called" in capsys.readouterr().err
    for given in (
        DataLoader(NUMBERS, batch_size=4, worker_init_fn=print),
        DataLoader(Stream(), worker_init_fn=print),
    ):
        taken_over(given, key="train_data", trains=True)  # without workers nothing would call it
    assert capsys.readouterr().err == ""
    dividing = DataLoader(Stream(), num_workers=2, worker_init_fn=print)
    with pytest.raises(ConfigError, match=r"may be what divides the stream.*\[loader-not-taken\]"):
        taken_over(dividing, key="train_data", trains=True)
