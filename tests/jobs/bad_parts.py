"""Digits of which some are poisoned, and a fault of hardware: for `training.bad_steps`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from framework.recipes.image_sets.digits import build


class Poisoned(Dataset[tuple[torch.Tensor, int]]):
    """Digits; the images of some are multiplied by a number."""

    def __init__(self, factors: dict[int, float], samples: Any) -> None:
        self._factors, self._samples = factors, samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self._samples[index]
        return image * self._factors.get(index, 1.0), int(label)


def poisoned_digits(indices: list[int], factor: float | str) -> tuple[Poisoned, Any]:
    splits = build(28)
    return Poisoned(dict.fromkeys(indices, float(factor)), splits.train), splits.evaluation


class FaultyNet(nn.Module):
    """A net that draws numbers and counts batches; in one pass of one rank bits flip, once."""

    def __init__(self, fault: str = "", step: int = 0, rank: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(32, 10),
        )
        self._fault, self._step, self._rank, self._passes = fault, step, rank, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images)
        self._passes += self.training
        if self._passes != self._step or torch.distributed.get_rank() != self._rank:
            return outputs
        if self._fault == "gradient":
            outputs.register_hook(_flipped)
        return (
            outputs + (_flipped(outputs) - outputs).detach() if self._fault == "loss" else outputs
        )


def _flipped(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers with the highest bit of the exponent turned, in the largest of each row."""
    numbers = numbers.detach().clone()
    numbers.view(torch.int32)[torch.arange(len(numbers)), numbers.argmax(1)] ^= 1 << 30
    return numbers
