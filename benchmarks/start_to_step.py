"""Measures what a start costs until its first step is over: `train.py`, and a bare DeepSpeed script
with the same model, optimizer and batch.

    python -m benchmarks.start_to_step [--starts 7] [--out benchmarks/results/start_to_step.json]

One rank on CPU; the sides start in turn, after one start each that fills caches. Processor seconds
are those of the process from its start to the end of the step; on a machine with other work they
vary less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from framework.system.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[1]
TARGET: Final = 1.2  # times the bare script
_BEGAN: Final = "START_TO_STEP_BEGAN"
_MARK: Final = "first step:"
_BATCH: Final = 64
_CONFIG: Final[Mapping[str, Any]] = {
    "model": {"kind": "lenet", "image_size": 28},
    "data": {
        "kind": "synthetic_images",
        "image_size": 28,
        "channels": 1,
        "num_classes": 10,
        "num_samples": 10 * _BATCH,
        "num_eval_samples": _BATCH,
    },
    "batch": {"global_size": _BATCH},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "scheduler": {"kind": "constant"},
    "training": {"max_steps": 1},
    "checkpoint": {"at_end": False},
    "callbacks": [{"target": "benchmarks.start_to_step:FirstStep"}],
}
_BARE: Final = f"""
import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

deepspeed.init_distributed("gloo")
model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
)
data = TensorDataset(torch.randn({10 * _BATCH}, 1, 28, 28), torch.randint(10, ({10 * _BATCH},)))
config = {{
    "train_batch_size": {_BATCH},
    "gradient_clipping": 1.0,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3, "torch_adam": True}}}},
}}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
images, labels = next(iter(DataLoader(data, batch_size={_BATCH})))
engine.backward(nn.functional.cross_entropy(engine(images), labels))
engine.step()
from benchmarks.start_to_step import report
report()
"""


class FirstStep:
    """Callback that prints what the process has used when its first step is over."""

    def on_step(self, state: Any) -> None:
        report()


def report() -> None:
    """Print the processor seconds of this process, and the seconds since it was started."""
    used = [time.process_time(), time.time() - float(os.environ[_BEGAN])]
    print(_MARK, json.dumps(used), flush=True)


def start(command: list[str]) -> tuple[float, float]:
    """Start a side, and return its processor seconds and seconds to the end of its first step."""
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        _BEGAN: repr(time.time()),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            processor, wall = json.loads(line.removeprefix(_MARK))
            return processor, wall
    raise SystemExit(f"{command[1]} has not trained:\n{done.stdout}{done.stderr}")


def measure(num_starts: int) -> dict[str, Any]:
    """Return the seconds of both sides, and the ratio of their medians."""
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "run.json"
        config.write_text(json.dumps({**_CONFIG, "run": {"output_dir": name}}))
        sides = {
            "train.py": [sys.executable, str(ROOT / "train.py"), "--config", str(config)],
            "bare DeepSpeed": [sys.executable, "-c", _BARE],
        }
        for command in sides.values():
            start(command)
        measured: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for _ in range(num_starts):
            for side, command in sides.items():
                measured[side].append(start(command))
    results: dict[str, Any] = {}
    for side, starts in measured.items():
        processor = [seconds for seconds, _ in starts]
        wall = [seconds for _, seconds in starts]
        results[side] = {
            "median_processor_seconds": round(statistics.median(processor), 3),
            "processor_seconds": [round(min(processor), 3), round(max(processor), 3)],
            "median_seconds": round(statistics.median(wall), 3),
        }
    ours, bare = (results[side]["median_processor_seconds"] for side in sides)
    results["ratio"] = round(ours / bare, 3)
    results["target"] = TARGET
    results["starts"] = num_starts
    results["load_average"] = round(os.getloadavg()[0], 1)
    return results


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="Measure a start to its first step.")
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.starts), indent=2) + "\n"
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
