"""The way of a batch from the sampler to the task: few generators, a known list of files, each
batch read when it is needed, and its wait timed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch.utils.data import Dataset

from framework.data.loaders import Reading, TrainLoader
from framework.data.order import MicroBatchSampler, Ordering, SampleKey, Share
from framework.engine.step_batches import StepLoss
from framework.tasks.task import Task
from tests.fake_engine import RecordedStep, RecordingEngine
from tests.places import ROOT
from tests.train.test_trainer import Memory, agenda
from tests.train.trainer_of import trainer_of

_MOST_GENERATORS = 4
_MOST_FILES = 8
# What a real engine adds to the files that this test goes through.
_OF_THE_ENGINE = {"engine/plain_engine.py", "engine/base_engine.py"}


class Mean(Task):
    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return cast(torch.Tensor, (outputs - targets).mean())


class StepEngine(RecordingEngine):
    """Takes a step's micro-batches as `PlainEngine` does."""

    read: list[int]

    def train_step(self, micro_batches: Iterator[Any]) -> RecordedStep:
        of_step = StepLoss(Mean(), micro_batches=2)

        def take() -> tuple[Any, Any]:
            (numbers,) = next(micro_batches)
            return numbers.float(), torch.zeros(2)

        for outputs, targets in of_step.weighted(take):
            of_step(outputs, targets)
            self.read += [int(number) for number in outputs]
        self.step += 1
        return RecordedStep(self.step, self)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the framework that wait for the caller."""
    frame = inspect.currentframe()
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(ROOT / "framework"):
            yield frame
        frame = frame.f_back


class Stacks(Dataset[Any]):
    """Notes who waits for a sample: files, and the generators among the frames."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.generators: set[str] = set()

    def __len__(self) -> int:
        return 64

    def note(self) -> None:
        for frame in _frames():
            code = frame.f_code
            self.files.add(str(Path(code.co_filename).relative_to(ROOT / "framework")))
            if code.co_flags & inspect.CO_GENERATOR:
                owner = frame.f_locals.get("self")
                self.generators.add(f"{type(owner).__name__}.{code.co_name}")

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        self.note()
        return (torch.tensor(index),)


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Stacks:
    """The dataset of a run of three steps, which was trained."""
    dataset = Stacks()
    keys_of = MicroBatchSampler.__iter__

    def noted(sampler: MicroBatchSampler) -> Iterator[list[SampleKey]]:
        dataset.generators.add(keys_of.__qualname__)
        dataset.files.add("data/order.py")
        return keys_of(sampler)

    monkeypatch.setattr(MicroBatchSampler, "__iter__", noted)
    _train(dataset)
    return dataset


def _train(dataset: Dataset[Any], **options: Any) -> StepEngine:
    loader = TrainLoader(
        dataset,
        share=Share(4, 2, 2, 0, 1),
        reading=Reading(seed=0),
        ordering=Ordering(),
    )
    engine = StepEngine()
    engine.read = []
    trainer_of(engine, schedule=agenda(3), train_data=loader, **options).fit()
    return engine


def test_a_batch_goes_through_few_generators(dataset: Stacks) -> None:
    expected = {
        "MicroBatchSampler.__iter__",
        "TrainLoader.stream",
        "Trainer._micro_batches",
        "StepLoss.weighted",
    }
    assert dataset.generators == expected
    assert len(expected) <= _MOST_GENERATORS


def test_a_batch_goes_through_few_files(dataset: Stacks) -> None:
    files = dataset.files | _OF_THE_ENGINE
    assert len(files | {"tasks/task.py"}) <= _MOST_FILES, sorted(files)


def test_the_page_names_the_files(dataset: Stacks) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    start = page.index("- **A batch**")
    journey = page[start : page.index("- **", start + 1)]
    missing = {name for name in dataset.files | _OF_THE_ENGINE if f"`{name}`" not in journey}
    assert missing == set()


class Slow(Stacks):
    """Samples that take a quarter of a second each, by a clock of their own."""

    now = 0.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        self.now += 0.25
        return super().__getitem__(index)


def test_waits_are_timed() -> None:
    dataset = Slow()
    memory = Memory()
    engine = _train(dataset, monitors=[memory], clock=lambda: dataset.now)
    assert engine.read == list(range(12)), "in order, and none ahead of its step"
    assert dataset.now == 12 * 0.25
    (first, *_) = [point.metrics for point in memory.points if "time/data_ms" in point.metrics]
    assert first["time/data_ms"] == first["time/step_ms"] == 1000.0
