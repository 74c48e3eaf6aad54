"""Models, data and tasks that show what becomes of a batch, of its statistics and of its gradients:
named by import path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset

import framework

WIDTH, TARGET = 4, 1001.0  # the target is 1000 in bfloat16


def far_targets() -> tuple[TensorDataset, TensorDataset]:
    """Small inputs and large targets."""
    inputs = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, torch.full((48,), TARGET)), TensorDataset(
        inputs[:10], torch.full((10,), TARGET)
    )


class Zero(nn.Linear):
    """Return the argument."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)[:, 0] * 0.0


def zeros() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Zero(WIDTH, 1))


class Placed(nn.Module):
    """Knows whether it was moved to a device."""

    was_moved = False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.was_moved = True
        return super().to(*args, **kwargs)


class Rooted(framework.Task):
    """Derives metrics that are tensors: a root, and whether what it holds was moved."""

    def __init__(self) -> None:
        self.held = Placed()

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return mse_loss(outputs.float(), targets)

    def derive(self, metrics: Mapping[str, float]) -> Any:
        return {
            "root": torch.tensor(metrics["loss"]).sqrt(),
            "moved": torch.tensor(self.held.was_moved),
        }


class DrawnTwice(Dataset[int]):
    """Inputs and targets are one draw of its `collate_fn`."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> int:
        return index

    @staticmethod
    def collate_fn(samples: list[int]) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(len(samples), WIDTH)
        return drawn, drawn


def drawn_twice() -> tuple[DrawnTwice, DrawnTwice]:
    return DrawnTwice(), DrawnTwice()


class Same(nn.Module):
    """Hands on what it is given, until its weight is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def same() -> nn.Sequential:
    return nn.Sequential(Same(), Same())


class Rootless(Zero):
    """A finite number whose gradient is none."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) + (self.weight * 0.0).sqrt().sum()


def rootless() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Rootless(WIDTH, 1))


class Scaled(nn.Linear):
    """A sum times a number that is learnt, as CLIP's `logit_scale`: a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)
        nn.init.constant_(self.weight, 0.1)
        nn.init.constant_(self.bias, 0.2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)[:, 0] * self.scale


def scaled() -> nn.Sequential:
    return nn.Sequential(Scaled())


def ones() -> tuple[TensorDataset, TensorDataset]:
    """One sample over and over: it does not matter which of them a rank has."""
    one = TensorDataset(torch.ones(48, WIDTH), torch.full((48,), 3.0))
    return one, one


def normed() -> nn.Sequential:
    """Batch norm for points of `tests.jobs.pipe_parts`."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
