"""Trains on a GPU where anything that waits for it between logged points is an error: no_waits.py
FOLDER SECTIONS.

torch sees its own waits (`torch.cuda.set_sync_debug_mode`): reads of values, and copies from
pageable memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

import framework
from framework.engine.bad_steps import StepWatch
from framework.engine.plain_engine import PlainEngine
from framework.engine.step import Step

LOG_EVERY = 5
_train_step, _read, _read_bad = PlainEngine.train_step, Step.read, StepWatch.read
_num_steps = 0


def train_step(engine: PlainEngine, micro_batches: Iterator[Any]) -> Step:
    """From the second logged point on: before it, everything is made that is made once."""
    global _num_steps
    _num_steps += 1
    if _num_steps > 2 * LOG_EVERY:
        torch.cuda.set_sync_debug_mode("error")
    return _train_step(engine, micro_batches)


def read(step: Step) -> Any:
    torch.cuda.set_sync_debug_mode("default")
    return _read(step)


def read_bad(watch: StepWatch) -> Any:
    """At logged points, before the step itself is read."""
    torch.cuda.set_sync_debug_mode("default")
    return _read_bad(watch)


if __name__ == "__main__":
    PlainEngine.train_step, Step.read = train_step, read  # type: ignore[method-assign]
    StepWatch.read = read_bad  # type: ignore[method-assign]
    sections = json.loads(sys.argv[2])
    framework.fit(
        {
            "run": {"name": "run", "output_dir": sys.argv[1]},
            "data": {"kind": "digits", "num_workers": 1},
            "batch": {"global_size": 120, "micro_size": 60},
            "precision": {"dtype": "autocast"},
            "optimizer": {"kind": "adamw", "implementation": "fused"},
            "evaluation": {"at_end": False},
            "checkpoint": {"at_end": False},
            "monitors": {"progress": "off"},
            **sections,
            "training": {
                "max_steps": 6 * LOG_EVERY,
                "log_every": LOG_EVERY,
                **sections.get("training", {}),
            },
        }
    )
    sys.stdout.flush()
    os._exit(0)
