"""Run folders for tests of reports: written as a run writes them, with figures that are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

# Parts of a step of 100 ms, in their order.
PARTS = {
    "data": 4.0,
    "copy": 2.0,
    "forward": 30.0,
    "backward": 48.0,
    "communication": 6.0,
    "optimizer": 8.0,
    "other": 2.0,
}
PLAN = {
    "cluster": {"num_hosts": 1, "devices_per_host": 2, "device": "cuda", "world_size": 2},
    "layout": {
        "world_size": 2,
        "data_parallel_size": 2,
        "global_size": 64,
        "micro_size": 32,
        "accumulation_steps": 1,
    },
    "length": {"steps_per_epoch": 20, "total_steps": 100},
    "memory": {
        "peak": "backward",
        "total_bytes": {"backward": 3 << 30},
        "bytes": {"backward": {"parameters": 1 << 30, "activations": 2 << 30}},
    },
}
CONFIG = {
    "run": {"name": "made"},
    "model": {"kind": "gpt"},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
}
START = 1_700_000_000.0


def point(step: int, *, time: float | None = None, **metrics: float | None) -> dict[str, Any]:
    """A line of metrics.jsonl; names are written with ``__`` for the slash."""
    stamp = START + 5 + step / 10 if time is None else time
    return {"step": step, "epoch": step / 20, "time": stamp} | {
        name.replace("__", "/"): value for name, value in metrics.items()
    }


def points(steps: Sequence[int], *, parts: Mapping[str, float] = PARTS) -> list[dict[str, Any]]:
    """Points of a usual run: a falling loss, evaluations every 25 steps, one skipped step, parts
    that add up.
    """
    found = []
    for step in steps:
        each = point(
            step,
            train__loss=4 * math.exp(-step / 40) + 0.5,
            train__lr=1e-3 * (1 - step / 200),
            train__grad_norm=1 + 1 / step,
            train__skipped_steps=float(step >= 40),
            throughput__samples_per_sec=640.0,
            throughput__tokens_per_sec=640.0 * 128,
            throughput__mfu=0.35,
            memory__device_peak_bytes=2.5 * (1 << 30),
            time__step_ms=sum(parts.values()),
            custom__entropy=0.1 * step,
        )
        found.append(each | {f"time/{name}_ms": value for name, value in parts.items()})
        if step % 25 == 0:
            found.append(
                point(step, eval__loss=3 * math.exp(-step / 50) + 0.6, eval__accuracy=step / 120)
            )
    return found


EVENTS = (
    {"time_seconds": START, "step": 0, "kind": "start"},
    {
        "time_seconds": START + 10,
        "step": 50,
        "kind": "save",
        "seconds": 0.5,
        "path": "checkpoints/global_step50",
    },
    {"time_seconds": START + 12, "step": 60, "kind": "warning", "text": "a disk is slow"},
    {"time_seconds": START + 15.5, "step": 100, "kind": "end"},
)


def write_run(
    folder: Path,
    *,
    lines: Sequence[Mapping[str, Any]] | None = None,
    events: Sequence[Mapping[str, Any]] | None = EVENTS,
    config: Mapping[str, Any] = CONFIG,
    plan: Mapping[str, Any] = PLAN,
    environment: Mapping[str, Any] | None = None,
    change: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """Write a run folder; returns it."""
    (folder / "logs").mkdir(parents=True)
    lines = points(range(5, 101, 5)) if lines is None else lines
    (folder / "checkpoints").mkdir()
    for step in (50, 100):
        if lines and lines[-1]["step"] >= step:
            (folder / "checkpoints" / f"global_step{step}").mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "environment.json").write_text(
        json.dumps(environment or {"device": "H100", "versions": {"torch": "2"}})
    )
    (folder / "logs/rank0.log").write_text(
        "2026-11-25 08:02:15,159 INFO dsf-trainer: step 5\n"
        "2026-11-25 08:02:15,159 WARNING dsf-trainer: loaders stall [stalls]\n"
    )
    change(folder)
    return folder
