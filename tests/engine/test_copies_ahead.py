"""Copies to a device beside its work: their order, on streams that record it, and runs that train
on them as without.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from framework.engine.copies_ahead import BatchesAhead
from framework.engine.step_batches import CopiedBatch, DeviceBatches, streams_of
from tests.engine.late_streams import LateStreams
from tests.launched import found_by_ranks

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sentence:
    words: torch.Tensor
    name: str


class Graph:
    """A batch object that moves itself."""

    def __init__(self, nodes: torch.Tensor, device: torch.device | None = None) -> None:
        self.nodes = nodes
        self.moved_to = device

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes, device)


def on(streams: LateStreams) -> DeviceBatches:
    return DeviceBatches(CPU, streams=streams)


def numbers(count: int, read: list[int]) -> Iterator[torch.Tensor]:
    for number in range(count):
        read.append(number)
        yield torch.tensor([number])


def test_a_processor_copies_in_the_order_of_its_work() -> None:
    assert streams_of(CPU) is None


def test_a_batch_is_read_after_the_wait_for_its_copies() -> None:
    streams = LateStreams()
    batch = {
        "a": [torch.rand(2), 1],
        "b": Pair(torch.rand(3), "text"),
        "c": Sentence(torch.rand(2), "name"),
        "none": None,
    }
    copied = on(streams).begin(batch)
    assert streams.order == ["copy", "copy", "copy", "mark"]
    assert copied.batch["b"].image.tolist() == [-1.0] * 3  # not there yet
    moved = on(streams).move(copied)
    assert streams.order[4:] == ["wait"]
    assert torch.equal(moved["a"][0], batch["a"][0])
    assert torch.equal(moved["b"].image, batch["b"].image)
    assert torch.equal(moved["c"].words, batch["c"].words)
    assert (type(moved["b"]), type(moved["c"]), moved["none"]) == (Pair, Sentence, None)
    # All that the copying stream has allocated is kept from it while it is read.
    copies = [moved["a"][0], moved["b"].image, moved["c"].words]
    assert streams.kept == [one.data_ptr() for one in copies]


def test_what_the_copying_stream_cannot_own_is_moved_by_the_computing_one() -> None:
    streams = LateStreams()
    packed = pack_sequence([torch.rand(3), torch.rand(1)])
    sparse = torch.eye(2).to_sparse()
    moved = on(streams).move([Graph(torch.rand(1)), packed, sparse])
    on_device = DeviceBatches(torch.device("meta"), streams=streams)
    on_device.move(torch.empty(2, device="meta"))
    assert "copy" not in streams.order
    assert moved[0].moved_to == CPU
    assert torch.equal(moved[1].data, packed.data)
    assert moved[2].is_sparse


def test_the_next_batch_is_begun_once_and_in_order() -> None:
    streams = LateStreams()
    read: list[int] = []
    ahead = BatchesAhead(numbers(9, read), on(streams).begin, count=4)
    found = []
    for step in range(2):
        for _ in range(2):
            found.append(int(on(streams).move(next(ahead))))
        ahead.fill()
        ahead.fill()
        assert len(read) == min(3 + 2 * step, 4), "never beyond the last step"
    assert found == [0, 1, 2, 3]
    # The copy of the third batch is put before the second step asks for it.
    assert streams.order == [
        *("copy", "mark", "wait"),
        *("copy", "mark", "wait"),
        *("copy", "mark"),
        *("wait",),
        *("copy", "mark", "wait"),
    ]


def test_an_error_is_raised_by_the_step_that_needs_the_batch() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise RuntimeError("sample 1 is broken")

    ahead = BatchesAhead(failing(), lambda batch: CopiedBatch(batch, (), None), count=9)
    assert next(ahead).batch == 0
    ahead.fill()
    with pytest.raises(RuntimeError, match="sample 1"):
        next(ahead)


def test_the_end_of_the_data_is_its_end() -> None:
    ahead = BatchesAhead(iter([0]), lambda batch: CopiedBatch(batch, (), None), count=9)
    next(ahead)
    ahead.fill()
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train each case with copies ahead and without, in one job."""
    return found_by_ranks("copied_ahead.py", num_ranks=1, folder=tmp_path_factory.mktemp("ahead"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "waits"),
    [
        # 6 steps of 3 micro-batches, 3 evaluations of 5 batches, the last one smaller, and the
        # batch by which evaluation is tried before the first step
        ("digits", 6 * 3 + 3 * 5 + 1),
        # 6 steps of 2; 3 evaluations of 50 samples in batches of 7
        ("dicts", 6 * 2 + 3 * 8 + 1),
        ("rerun", 6 * 2),
    ],
)
def test_runs_are_equal_to_the_bit(runs: Any, case: str, waits: int) -> None:
    found = runs[case]
    assert found["ahead"] == found["plain"]
    assert len(found["plain"]) >= 6
    assert found["waits"] == waits
    assert found["copies"] == 2 * waits  # inputs and targets
