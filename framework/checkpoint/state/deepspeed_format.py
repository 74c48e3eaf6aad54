"""Descriptions of checkpoints that DeepSpeed wrote by itself, as their manifest would be, read from
DeepSpeed's files and their names.

Its files are read as weights only, and no checksum tells whether they are as they were written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import MODEL_FILE, OPTIMIZER_FILE, SWAPPED, RawNames, read_names
from framework.checkpoint.resume_point import UNVERIFIED
from framework.checkpoint.state.checkpoint_engine import read_or_explain
from framework.checkpoint.state.shard_map import CheckpointFiles
from framework.errors import StorageError, in_one_line
from framework.system.log import warn

_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")


def describe_raw(checkpoint: SavedCheckpoint) -> SavedCheckpoint:
    """The checkpoint with a manifest; one that has its own is returned as it is.

    Raises:
        StorageError: kind ``checkpoint-unverified``: a file is missing, cannot be read, or is of a
        kind that is not known here.
    """
    if checkpoint.verified or "step" in checkpoint.manifest:
        return checkpoint
    folder = checkpoint.path
    damage = checkpoint.damage()
    if damage:
        raise _refused(folder, damage[0])
    names = read_names(folder)
    _refuse_other_kinds(folder, names)
    try:
        return replace(checkpoint, manifest=_manifest(folder, names))
    except StorageError:
        raise
    except Exception as error:  # another release, or no checkpoint at all, fails in a dozen ways
        raise _refused(folder, in_one_line(error)) from error


def warn_of(checkpoint: SavedCheckpoint, *, resumed: bool = False) -> None:
    """Say what is not known of a checkpoint without a manifest, on the first rank; nothing for any
    other.
    """
    if checkpoint.verified or os.environ.get("RANK", "0") != "0":
        return
    text = (
        f"{checkpoint.path}: DeepSpeed {checkpoint.manifest['versions']['deepspeed']} wrote it "
        "without a manifest: nothing tells whether its files are whole"
    )
    if resumed:
        text += (
            f"; weights, optimizer state, loss scale and step {checkpoint.step} are taken from "
            "it; the data go on after that many steps of this run's own order; random states are "
            "not in it and start from run.seed; learning rate, schedule and all other settings "
            "are those of this run"
        )
    warn(f"{text} [{UNVERIFIED}]")


def _refuse_other_kinds(folder: Path, names: RawNames) -> None:
    if names.has_layers:
        raise _refused(folder, "it is a pipeline's, whose layers DeepSpeed only numbers")
    if names.model_parallel > 1:
        raise _refused(
            folder,
            f"it has {names.model_parallel} model-parallel parts, which cannot be put together "
            "without knowing how the model was cut",
        )
    if any(folder.glob("*_expert_*")):
        raise _refused(folder, "it holds experts, which no model of this framework has")
    if (folder / SWAPPED).exists():
        raise _refused(
            folder, "its optimizer state was offloaded to NVMe, in the files of DeepSpeed's swapper"
        )


def _manifest(folder: Path, names: RawNames) -> dict[str, Any]:
    named = CheckpointFiles(folder).named
    files = {
        kind: {rank: name for (rank, _), name in named(pattern).items()}
        for kind, pattern in (("model", MODEL_FILE), ("optimizer", OPTIMIZER_FILE))
    }
    first = _read(folder / files["model"][0])
    counters = {name: _count(first[name], name) for name in _COUNTERS}
    step = counters["global_steps"]
    samples = counters["global_samples"]
    ranks = counters["dp_world_size"]
    if names.step is not None and names.step != step:
        raise _refused(folder, f"its name says step {names.step} and its files say step {step}")
    for kind, found in files.items():
        if names.stages == (0,) or (kind == "model" and 3 not in names.stages):
            continue
        # The first one only: the number is out of a file that nothing vouches for, and may be any.
        missing = next((rank for rank in range(ranks) if rank not in found), None)
        if missing is not None or len(found) != ranks:
            raise _refused(
                folder,
                f"{ranks} ranks wrote it, and there are {len(found)} {kind} files"
                if missing is None
                else f"{ranks} ranks wrote it, and there is no {kind} file of rank {missing}",
            )
    # None: the steps were not all alike
    per_step = samples // step if step and samples % step == 0 else None
    if isinstance(first["ds_config"], Mapping):
        written_with = first["ds_config"]
    else:
        written_with = {}
    stage = 0
    if names.stages != (0,):
        stage = int(_read(folder / files["optimizer"][0])["optimizer_state_dict"]["zero_stage"])
        if stage not in names.stages:
            raise _refused(
                folder, f"its files are named as at stage {names.stages[0]} and say stage {stage}"
            )
    return {
        "step": step,
        "samples": samples,
        "layout": {"world_size": ranks, "pipe_size": 1, "global_size": per_step},
        "versions": {"deepspeed": str(first["ds_version"])},
        "config": {
            "run": {"name": folder.parent.name},
            "zero": {"stage": stage},
            "precision": {"dtype": _dtype(written_with)},
        },
    }


def _read(file: Path) -> Any:
    try:
        return read_or_explain(file, mmap=True)
    except StorageError as error:
        raise _refused(file.parent, str(error)) from error


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


def _dtype(written_with: Mapping[str, Any]) -> str:
    for dtype, keys in (("fp16", ("fp16",)), ("bf16", ("bf16", "bfloat16"))):
        if any(
            isinstance(section := written_with.get(key), Mapping) and section.get("enabled")
            for key in keys
        ):
            return dtype
    return "fp32"


def _refused(folder: Path, reason: str) -> StorageError:
    return StorageError(
        f"{folder}: it cannot be read without a manifest: {reason}; name another checkpoint "
        f"[{UNVERIFIED}]"
    )
