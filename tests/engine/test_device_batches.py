"""What becomes of a batch, and of what a task holds, on the way to the device: here the device that
holds no numbers.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from framework.engine.step_batches import DeviceBatches, place
from framework.tasks.from_callable import as_task
from framework.tasks.task import Task
from tests.tasks.value import value_of

META, CPU = torch.device("meta"), torch.device("cpu")
Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sentence:
    words: Tensor
    name: str
    length: int = field(init=False, default=3)


class Graph:
    """As graph libraries make them: a batch object that moves itself."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Plain(Task):
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return torch.zeros(())


def packed() -> PackedSequence:
    return pack_sequence([torch.rand(3, 2), torch.rand(1, 2)])


def test_containers_keep_their_types() -> None:
    batch = {"a": [torch.rand(2), 1], "b": (torch.rand(2), "text"), "c": Pair(torch.rand(2), None)}
    moved = DeviceBatches(META).move(batch)
    assert [moved["a"][0].device, moved["b"][0].device, moved["c"].image.device] == [META] * 3
    assert (moved["a"][1], moved["b"][1], moved["c"].label, type(moved["c"])) == (
        1,
        "text",
        None,
        Pair,
    )


def test_a_packed_sequence_is_moved_as_one_and_keeps_its_sizes_on_the_cpu() -> None:
    moved = DeviceBatches(META).move([packed()])[0]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device, moved.batch_sizes.device) == (META, CPU)
    read = DeviceBatches(CPU, torch.bfloat16).as_read(packed())
    assert (read.data.dtype, read.batch_sizes.dtype) == (torch.bfloat16, torch.int64)


def test_batch_objects_and_dataclasses_are_moved() -> None:
    graph, sentence = DeviceBatches(META).move((Graph(torch.rand(2)), Sentence(torch.rand(2), "a")))
    assert (graph.nodes.device, sentence.words.device, sentence.name, sentence.length) == (
        META,
        META,
        "a",
        3,
    )
    assert (
        DeviceBatches(CPU, torch.float16).as_read(Sentence(torch.rand(2), "a")).words.dtype
        == torch.float16
    )


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_what_the_model_reads_is_converted_and_the_targets_keep_their_type(
    half: torch.dtype | None,
) -> None:
    images, boxes, labels = (
        torch.rand(2, 3, 8, 8),
        torch.rand(2, 3, 8, 8) * 300_000.0,
        torch.tensor([1, 2]),
    )
    (read, numbers), targets = DeviceBatches(CPU, half, channels_last=True).split(
        Plain(), (images, labels, boxes)
    )
    assert (read.dtype, numbers.dtype) == (half or torch.float32, torch.int64)
    assert read.is_contiguous(memory_format=torch.channels_last)
    assert targets.is_contiguous()
    assert torch.equal(targets, boxes)
    assert targets.dtype == torch.float32


def test_a_batch_is_on_the_device_before_it_is_split() -> None:
    class Splits(Plain):
        def split(self, batch: Any) -> tuple[Any, Any]:
            assert batch.device == META
            return batch, batch * 2

    inputs, targets = DeviceBatches(META, torch.bfloat16).split(Splits(), torch.rand(2))
    assert (inputs.dtype, targets.dtype, targets.device) == (torch.bfloat16, torch.float32, META)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        partial(cross_entropy, weight=torch.ones(3)),
        partial(partial(cross_entropy, label_smoothing=0.1), weight=torch.ones(3)),
        partial(nn.CrossEntropyLoss(weight=torch.ones(3))),
    ],
)
def test_the_class_weights_of_a_loss_are_placed_on_the_device(loss: Any) -> None:
    task = as_task(loss)
    place(task, META)
    outputs, targets = (
        torch.zeros(2, 3, device=META),
        torch.zeros(2, dtype=torch.int64, device=META),
    )
    assert value_of(task.loss(outputs, targets)).device == META
    held = task.function  # type: ignore[attr-defined]
    weight = (
        held.weight
        if isinstance(held, nn.Module)
        else held.keywords.get("weight", getattr(held.func, "weight", None))
    )
    assert weight.device == META


def test_what_a_task_holds_is_placed_on_the_device_and_nothing_else_changes() -> None:
    task: Any = Plain()
    task.weights, task.teacher, task.names = torch.ones(3), nn.Linear(2, 2), ["a"]
    place(task, META)
    assert (task.weights.device, task.teacher.weight.device) == (META, META)
    assert task.names == ["a"]


class Both(Plain, nn.Module):
    """A task that is a module as well keeps what it holds where modules do."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("weights", torch.ones(3))
        self.teacher = nn.Linear(2, 2)


def test_a_task_that_is_a_module_and_what_lies_in_containers_are_placed() -> None:
    both: Any = Both()
    place(both, META)
    assert (both.weights.device, both.teacher.weight.device) == (META, META)
    task: Any = Plain()
    task.losses, task.scales = (
        [nn.CrossEntropyLoss(weight=torch.ones(3))],
        {"a": (torch.ones(1), 2)},
    )
    place(task, META)
    assert (task.losses[0].weight.device, task.scales["a"][0].device, task.scales["a"][1]) == (
        META,
        META,
        2,
    )
