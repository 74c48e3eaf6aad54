"""Checkpoints of one file, and manifests without any file at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.checkpoint.checkpointer import Checkpointer, Retention, SaveOptions
from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints
from framework.checkpoint.resume_point import find_checkpoint
from framework.config.load import config_from_values
from tests.fake_engine import SavingEngine

CONFIG = config_from_values({"run": {"name": "x"}}).to_dict()
LAYOUT = {
    "world_size": 2,
    "data_parallel_size": 2,
    "global_size": 8,
    "micro_size": 4,
    "accumulation_steps": 1,
    "pipe_size": 1,
}


def make_checkpointer(
    folder: Path,
    *,
    engine: SavingEngine | None = None,
    keep_last: int = 100,
    is_main: bool = True,
    last_step: int | None = None,
    config: Mapping[str, Any] = CONFIG,
) -> Checkpointer:
    folder.parent.mkdir(parents=True, exist_ok=True)  # the run's, which no save makes
    return Checkpointer(
        engine or SavingEngine(returns_records=False),
        folder,
        SaveOptions(
            Retention(keep_last),
            is_main=is_main,
            gather=lambda value: [value],
            last_step=last_step,
            position=lambda step: {"epoch": step // 4},
            description={"layout": LAYOUT, "config": config, "steps_per_epoch": 4},
        ),
    )


def write(folder: Path, *steps: int) -> list[SavedCheckpoint]:
    checkpointer = make_checkpointer(folder)
    for step in steps:
        checkpointer.save(step)
    return list_checkpoints(folder)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def find(resume: str | Path, run_checkpoints: Path) -> int | None:
    found = find_checkpoint(str(resume), run_checkpoints=run_checkpoints)
    return None if found is None else found.step


def saved(config: Mapping[str, Any], **changes: Any) -> SavedCheckpoint:
    manifest = {
        "format": 2,
        "step": 10,
        "layout": LAYOUT,
        "steps_per_epoch": 4,
        "config": dict(config),
    } | changes
    return SavedCheckpoint(
        Path("runs/x/checkpoints"), "global_step10", json.loads(json.dumps(manifest))
    )


def full(**sections: Any) -> dict[str, Any]:
    return config_from_values(sections).to_dict()
