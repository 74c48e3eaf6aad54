"""Trains with copies ahead, and images that stay uint8 until then, and without, on streams that are
late: copied_ahead.py FILE.

The losses of all steps and all metrics of evaluations go into the file, by case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import framework
from framework.data.batches import in_pixels
from framework.data.loaders import EvalLoader, TrainLoader
from framework.engine import base_engine
from framework.setup import assemble, components
from tests.engine.late_streams import LateStreams

QUIET = {"progress": "off"}


class Rows(Dataset[dict[str, Any]]):
    """Rows of two tensors and a text."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.rand(6, generator=draw), "name": str(index), "labels": index % 3}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, name: list[str]) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def pixels_for(make: Any) -> Any:
    """Return what makes a loader as for a device, on which images arrive as uint8."""
    return lambda dataset, **options: make(in_pixels(dataset), **options)


def rows(path: Path) -> list[dict[str, float]]:
    """Read the numbers of a run that do not depend on time."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.append({key: row[key] for key in row if key.startswith(("train/loss", "eval/"))})
    return found


def run(case: str, name: str) -> list[dict[str, float]]:
    """Train a case, and return its numbers."""
    values: dict[str, Any] = {
        "run": {"name": name, "output_dir": "runs"},
        "monitors": QUIET,
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "evaluation": {"every_steps": 2, "batch_size": 7},
        "training": {"max_steps": 6, "log_every": 1},
    }
    parts: dict[str, Any] = {}
    if case == "digits":
        values |= {
            "data": {"kind": "digits"},
            "model": {"kind": "lenet"},
            "batch": {"global_size": 24, "micro_size": 8},
        }
        values["evaluation"]["max_samples"] = 30
    if case == "rerun":
        values |= {"data": {"kind": "digits"}, "model": {"kind": "lenet"}}
        values["batch"] = {"global_size": 24, "micro_size": 12}
        values["evaluation"] = {"at_end": False}
        values["training"] |= {"bad_steps": {"rerun": True}}
    if case == "dicts":
        values["batch"] = {"global_size": 8}
        parts = {"model": net, "train_data": DataLoader(Rows(), batch_size=4), "eval_data": Rows()}
        parts["task"] = nn.functional.cross_entropy
    framework.fit(values, **parts)
    return rows(Path("runs", name, "metrics.jsonl"))


if __name__ == "__main__":
    all_found: dict[str, Any] = {}
    for case in ("digits", "dicts", "rerun"):
        plain = run(case, case)
        streams = LateStreams()
        base_engine.streams_of = lambda device, streams=streams: streams  # type: ignore[misc]
        components.TrainLoader = pixels_for(TrainLoader)  # type: ignore[misc]
        assemble.EvalLoader = pixels_for(EvalLoader)  # type: ignore[misc]
        ahead = run(case, f"{case}-ahead")
        base_engine.streams_of = lambda device: None
        components.TrainLoader = TrainLoader  # type: ignore[misc]
        assemble.EvalLoader = EvalLoader  # type: ignore[misc]
        all_found[case] = {
            "plain": plain,
            "ahead": ahead,
            "copies": streams.order.count("copy"),
            "waits": streams.order.count("wait"),
        }
    Path(sys.argv[1]).write_text(json.dumps(all_found), encoding="utf-8")
