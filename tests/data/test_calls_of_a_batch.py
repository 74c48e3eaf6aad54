"""Causes of a loader's speed: a batch of tensors or arrays takes as many calls as a small one, and as
few operations on tensors as it needs.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset, TensorDataset

from framework.data.batches import in_pixels
from framework.recipes.image_sets.image_tensors import ImageTensors
from framework.recipes.image_sets.synthetic import SyntheticImages
from framework.recipes.text.pairs import TextPairs
from framework.recipes.text.windows import TextWindows
from tests.data.loader_of import train_loader
from tests.recipes.text.text_samples import SPECIAL, VOCAB_SIZE, many_documents, tokens_of

SAMPLES = 400


def images(**options: Any) -> ImageTensors:
    pixels = torch.zeros(SAMPLES, 1, 8, 8, dtype=torch.uint8)
    return ImageTensors(
        pixels, torch.zeros(SAMPLES, dtype=torch.int64), mean=[0.5], std=[0.5], **options
    )


def text(kind: Any) -> Any:
    tokens = tokens_of(*many_documents())
    return kind(tokens, sequence_length=16, vocab_size=VOCAB_SIZE, special=SPECIAL)


TENSORS = TensorDataset(torch.rand(SAMPLES, 3), torch.arange(SAMPLES))
# Each with the most operations on tensors of a batch, of inputs and targets together.
DATASETS: dict[str, tuple[Any, int]] = {
    "tensors": (TENSORS, 2),  # a gather for each
    "a part of tensors": (Subset(TENSORS, range(10, 390)), 2),
    "images": (images(), 4),
    "images in pixels": (in_pixels(images()), 2),
    "augmented": (images(augment=True), 6),
    "noise": (SyntheticImages(SAMPLES, image_size=8, channels=1, num_classes=3), 2),
    "windows": (text(TextWindows), 2),
    "pairs": (text(TextPairs), 0),
}


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        # Marks of the profiler, and arrays that become tensors without a copy.
        if not name.startswith(("profiler.", "aten.lift_fresh")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def cost(dataset: Any, size: int) -> tuple[int, Counter[str]]:
    """Return the calls of Python and C, and the operations on tensors, of a batch after the first
    ones.
    """
    share = {"global_size": size, "micro_size": size, "accumulation_steps": 1}
    loader = train_loader(
        dataset, **share, rank=0, world_size=1, seed=1, random_samples=True, shuffle=True
    )
    stream = loader.stream(0)
    for _ in range(3):
        next(stream)
    gc.disable()  # which calls functions of other packages
    profile = cProfile.Profile()
    profile.runcall(next, stream)
    gc.enable()
    with Operations() as operations:
        next(stream)
    stream.close()
    return int(pstats.Stats(profile).total_calls), operations.counts  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DATASETS)
def test_a_large_batch_takes_the_calls_of_a_small_one(name: str) -> None:
    dataset, most_operations = DATASETS[name]
    few, _ = cost(dataset, 8)
    many, operations = cost(dataset, 32)
    assert many == few
    assert sum(operations.values()) <= most_operations, operations


def test_samples_of_other_datasets_are_read_one_by_one() -> None:
    """The count above can fail."""
    dataset = [(np.float32(number), number) for number in range(SAMPLES)]
    assert cost(dataset, 32)[0] > cost(dataset, 8)[0] + 24
