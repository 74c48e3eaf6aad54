"""Trains the same small run several times in one process per rank, at ZeRO stages in turn; prints each loss."""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import TensorDataset

import framework


def main() -> None:
    """Take the number of fits."""
    features = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, (features.sum(1) > 0).long())
    for number in range(int(sys.argv[-1])):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        config = {
            "run": {"name": f"fit{number}"},
            "batch": {"global_size": 8},
            "zero": {"stage": number % 3},
            "training": {"max_steps": 2},
            "checkpoint": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
        }
        result = framework.fit(config, model=model, train_data=data, task=torch.nn.functional.cross_entropy)
        if os.environ["RANK"] == "0":
            print("loss", result.metrics["train/loss"], flush=True)


if __name__ == "__main__":
    main()
