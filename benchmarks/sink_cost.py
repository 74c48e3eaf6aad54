"""What sinks cost a step: python -m benchmarks.sink_cost [--services] [--out
benchmarks/results/sink_cost.json]

Two starts of one run differ by more than sinks cost. So LeNet trains once, and the sinks are told
in every other block of 50 steps: what is compared are neighbouring blocks. `metrics.jsonl` is
always written. `--services` adds W&B (offline) and MLflow (files).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, load_average, machine, write

BLOCK = 50
NUM_BLOCKS = 178
WARM_UP = 100


class Switch:
    """A callback that silences the sinks in every other block, and notes both clocks after each
    step.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.wall: list[float] = []
        self.processor: list[float] = []

    def on_step(self, state: Any) -> None:
        self.wall.append(time.perf_counter())
        self.processor.append(time.thread_time())
        self.is_on = len(self.wall) // BLOCK % 2 == 0

    def silence(self, kind: Any) -> None:
        """Replace a kind of sink's `write` by one that skips points while the switch is off."""
        original_write = kind.write

        def write(sink: Any, point: Any) -> None:
            if self.is_on or sink.name == "metrics.jsonl":
                original_write(sink, point)

        kind.write = write

    def differences(self, clock: list[float]) -> list[float]:
        """Return the microseconds per step by which each block with sinks is longer than the next one
        without.
        """
        differences = []
        for step in range(WARM_UP, WARM_UP + BLOCK * (NUM_BLOCKS - 2), 2 * BLOCK):
            with_sinks = clock[step + BLOCK] - clock[step]
            without_sinks = clock[step + 2 * BLOCK] - clock[step + BLOCK]
            differences.append(1e6 * (with_sinks - without_sinks) / BLOCK)
        return differences


def interval(values: list[float]) -> list[float]:
    """Return the interval that holds 95 % of the medians of resampled values."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(2000))
    return [round(medians[50], 1), round(medians[1949], 1)]


def main() -> None:
    """Train, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--services", action="store_true", help="with W&B (offline) and MLflow (files)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "sink_cost.json")
    options = parser.parse_args()
    os.environ |= {"WANDB_SILENT": "true", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    from framework import fit
    from framework.train.monitors.base import Behind
    from framework.train.monitors.services import ServiceProcess

    switch = Switch()
    load = load_average()
    for kind in (Behind, ServiceProcess):
        switch.silence(kind)
    with tempfile.TemporaryDirectory() as folder:
        monitors: dict[str, Any] = {"progress": "off"}
        if options.services:
            monitors["wandb"] = {"offline": True}
            monitors["mlflow"] = {"tracking_uri": f"file:{folder}/mlflow"}
        config = {
            "run": {"output_dir": folder},
            "batch": {"global_size": 128},
            "training": {"max_steps": WARM_UP + BLOCK * NUM_BLOCKS, "log_every": 10},
            "evaluation": {"at_end": False},
            "checkpoint": {"at_end": False},
            "monitors": monitors,
        }
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            fit(config, callbacks=[switch])
    wall = switch.differences(switch.wall)
    processor = switch.differences(switch.processor)
    sinks = "TensorBoard, CSV, report"
    if options.services:
        sinks += ", W&B offline, MLflow files"
    step_seconds = [end - start for start, end in pairwise(switch.wall)]
    figures = {
        "step_ms": round(1000 * statistics.median(step_seconds), 3),
        "pairs_of_blocks": len(wall),
        "microseconds_per_step": {
            "median": round(statistics.median(wall), 1),
            "interval_95": interval(wall),
        },
        "processor_microseconds_per_step": {
            "median": round(statistics.median(processor), 1),
            "interval_95": interval(processor),
        },
    }
    results = {}
    if options.out.exists():
        results = json.loads(options.out.read_text(encoding="utf-8"))
    results[sinks] = {"machine": machine(), "load_before": load, **figures}
    write(results, options.out)


if __name__ == "__main__":
    main()
