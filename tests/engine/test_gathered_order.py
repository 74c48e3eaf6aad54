"""Where rows of ranks belong in the order of the data, and what a rank alone refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from framework.data.streams import StreamEvalLoader
from framework.engine.gathered import Collected, Source, _Header, _places, _Share
from framework.plan.layout import Layout


def headers(*rows_of_ranks: tuple[int, ...]) -> list[_Header]:
    found = []
    for number, rows in enumerate(rows_of_ranks):
        source = Source(number, number, 0, 1, True)
        found.append(_Header(source, 0, {"x": _Share(rows, 0)}))
    return found


def test_ranks_follow_each_other_or_take_turns() -> None:
    ranks = headers((3, 3, 1), (3, 3), ())
    assert _places("x", ranks, takes_turns=False) == {
        (0, 0): 0,
        (0, 1): 3,
        (0, 2): 6,
        (1, 0): 7,
        (1, 1): 10,
    }
    assert _places("x", ranks, takes_turns=True) == {
        (0, 0): 0,
        (1, 0): 3,
        (0, 1): 6,
        (1, 1): 9,
        (0, 2): 12,
    }


class Whole(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class Sharded(Whole):
    num_shards = 3

    def shard(self, **_: int) -> Any: ...


@pytest.mark.parametrize(
    ("dataset", "ranks", "turns"),
    [(Whole(), 2, True), (Sharded(), 2, False), (Sharded(), 3, False), (Sharded(), 4, True)],
)
def test_a_stream_in_fewer_parts_than_ranks_is_read_in_turns(
    dataset: Any, ranks: int, turns: bool
) -> None:
    loader = StreamEvalLoader(dataset, batch_size=2, rank=0, world_size=ranks, gather=list)
    assert loader.takes_turns is turns


def test_one_rank_of_a_tensor_group_and_the_last_stage_have_the_outputs() -> None:
    layout = Layout(
        world_size=16,
        data_parallel_size=2,
        global_size=8,
        micro_size=4,
        accumulation_steps=1,
        pipe_size=2,
        tensor_size=2,
        sequence_size=2,
    )
    sources = [Source.of(layout, rank) for rank in range(16)]
    assert [(one.rank, one.data_rank, one.part) for one in sources if one.is_source] == [
        (8, 0, 0),
        (10, 0, 1),
        (12, 1, 0),
        (14, 1, 1),
    ]


@pytest.mark.parametrize(
    ("batches", "parts", "reason"),
    [
        ([torch.zeros(2)], 1, "collect() returned a Tensor"),
        ([{"x": 3.0}], 1, "a float under 'x'"),
        ([{"x": torch.tensor(3.0)}], 1, "one number under 'x'"),
        ([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}], 1, "rows (3,) of torch.float32"),
        ([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}], 1, "y of one batch and x of another"),
        ([{"x": torch.zeros(2)}], 2, "ranks share the positions"),
    ],
)
def test_a_rank_keeps_its_refusal_for_all(batches: list[Any], parts: int, reason: str) -> None:
    collected = Collected(Source(0, 0, 0, parts, True), task_name="Mine", most_bytes=1000)
    for values in batches:
        collected.add(values, torch.zeros(2, 4))
    assert reason in collected._error
    assert collected._fix


def test_rows_are_copies() -> None:
    collected = Collected(Source(0, 0, 0, 1, True), task_name="Mine", most_bytes=1000)
    outputs = torch.ones(2, 50)
    collected.add({"x": outputs[:, 0]}, torch.zeros(2))
    outputs.zero_()
    (part,) = collected._parts["x"]
    assert part.tolist() == [1.0, 1.0]
    assert part.untyped_storage().nbytes() == 8
