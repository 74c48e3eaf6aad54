"""Trains the same small run several times in one process per rank, at the ZeRO stages that are
named; prints each loss, and what is left of the run afterwards.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
from torch.utils.data import TensorDataset

import framework


def main() -> None:
    """Take the port of a store as torchrun's, and the stages, one for each fit."""
    port, *stages = sys.argv[1:]
    os.environ |= {
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "many",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    linear, before = torch.nn.functional.linear, bytes_of_tensors()
    features = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, (features.sum(1) > 0).long())
    for number, stage in enumerate(stages):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        config = {
            "run": {"name": f"fit{number}"},
            "batch": {"global_size": 8},
            "zero": {"stage": int(stage)},
            "training": {"max_steps": 2},
            "checkpoint": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
        }
        result = framework.fit(
            config, model=model, train_data=data, task=torch.nn.functional.cross_entropy
        )
        if os.environ["RANK"] == "0":
            print("loss", result.metrics["train/loss"], flush=True)
            del model, result
            print(
                "left",
                bytes_of_tensors() - before - features.nbytes - data.tensors[1].nbytes,
                flush=True,
            )
    assert torch.nn.functional.linear is linear, "of a run without stage 3, after one with it"


def bytes_of_tensors() -> int:
    gc.collect()
    storages = [
        found.untyped_storage() for found in gc.get_objects() if isinstance(found, torch.Tensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main()
