"""A model of a user's: one weight under two names, batch norm, an odd number of everything."""

from __future__ import annotations

import torch
from torch import nn


class TiedNet(nn.Module):
    """Digits of 28 x 28 to ten classes. `there` has the weight of `here`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(784, 37)
        self.norm = nn.BatchNorm1d(37)
        self.here = nn.Linear(37, 37)
        self.there = nn.Linear(37, 37)
        self.there.weight = self.here.weight
        self.head = nn.Linear(37, 10)
        self.scale = nn.Parameter(torch.ones(1))

    def hf_names(self) -> dict[str, str]:
        """As of a published architecture; there are names of it that no export
        holds.
        """
        ours = ["stem", "norm", "here", "there", "head"]
        parts = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
        return {f"{name}.{part}": f"net.{name}_proj.{part}" for name in ours for part in parts} | {
            "scale": "net.scale"
        }

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 1, 28, 28) to (N, 10)."""
        value = self.norm(self.stem(images.flatten(1)))
        logits: torch.Tensor = self.head(self.there(self.here(value).relu()).relu()) * self.scale
        return logits


class OutsideNet(TiedNet):
    """The same, with a weight that is read outside of its own module, and of a module within
    another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(37, 37), nn.Tanh())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 1, 28, 28) to (N, 10)."""
        value = self.norm(self.stem(images.flatten(1)))
        hidden = self.body(value) + value @ self.body[0].weight
        logits: torch.Tensor = hidden @ self.stem.weight[:, :10] + super().forward(images)
        return logits
