"""Descriptions of checkpoints that DeepSpeed wrote by itself, as their manifest would be, read from
DeepSpeed's files and their names.

The files are read as weights only; without checksums, damage to them is not noticed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import MODEL_FILE, OPTIMIZER_FILE, SWAPPED, RawNames, read_names
from framework.checkpoint.resume_point import UNVERIFIED
from framework.checkpoint.state.checkpoint_engine import read_or_explain
from framework.checkpoint.state.raw_pipelines import describe_pipeline
from framework.checkpoint.state.stored import CheckpointFiles
from framework.errors import StorageError, in_one_line
from framework.system.log import warn

_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")


def describe_raw(checkpoint: SavedCheckpoint) -> SavedCheckpoint:
    """Return the checkpoint with a manifest, made up if it has none of its own.

    Raises:
        StorageError: kind ``checkpoint-unverified``: a file is missing, cannot be read, or is of an
            unknown kind.
    """
    if checkpoint.verified or "step" in checkpoint.manifest:
        return checkpoint
    folder = checkpoint.path
    damage = checkpoint.damage()
    if damage:
        raise _refusal(folder, damage[0])
    names = read_names(folder)
    _refuse_other_kinds(folder, names)
    try:
        return replace(checkpoint, manifest=_manifest(folder, names))
    except StorageError:
        raise
    except Exception as error:  # another release, or no checkpoint at all, fails in a dozen ways
        raise _refusal(folder, in_one_line(error)) from error


def refuse_to_resume(checkpoint: SavedCheckpoint) -> None:
    """Refuse a pipeline's checkpoint without a manifest as one that a run goes on from: its
    optimizer only numbers what it steps.

    Raises:
        StorageError: kind ``checkpoint-unverified``.
    """
    if not checkpoint.verified and "pipeline" in checkpoint.manifest:
        raise StorageError(
            f"{checkpoint.path}: a pipeline's checkpoint without a manifest brings its weights "
            "alone: its optimizer only numbers what it steps; name it in checkpoint.init_weights "
            f"[{UNVERIFIED}]"
        )


def warn_of(checkpoint: SavedCheckpoint, *, resumed: bool = False) -> None:
    """Warn, on the first rank, of the facts that are unknown of a checkpoint without a manifest."""
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
    if names.model_parallel > 1 and not names.has_layers:
        raise _refusal(
            folder,
            f"it has {names.model_parallel} model-parallel parts, which cannot be put together "
            "without knowing how the model was cut",
        )
    if any(folder.glob("*_expert_*")):
        raise _refusal(folder, "it holds experts, which no model of this framework has")
    if (folder / SWAPPED).exists():
        raise _refusal(
            folder, "its optimizer state was offloaded to NVMe, in the files of DeepSpeed's swapper"
        )


def _stage_in(folder: Path, optimizer_file: str, names: RawNames) -> int:
    """Read the ZeRO stage in an optimizer's file. Raises StorageError if the names of the files are
    names of another stage.
    """
    stage = int(_read(folder / optimizer_file)["optimizer_state_dict"]["zero_stage"])
    if stage not in names.stages:
        raise _refusal(
            folder, f"its files are named as at stage {names.stages[0]} and say stage {stage}"
        )
    return stage


def _manifest(folder: Path, names: RawNames) -> dict[str, Any]:
    """Make up a manifest from the first rank's files. Raises StorageError if files and names do not
    agree, and any other error for files of another release.
    """
    files = CheckpointFiles(folder)
    model_files = _files_by_rank(files, MODEL_FILE)
    optimizer_files = _files_by_rank(files, OPTIMIZER_FILE)
    first = _read(folder / model_files[0])
    counters = {name: _count(first[name], name) for name in _COUNTERS}
    step = counters["global_steps"]
    samples = counters["global_samples"]
    ranks = counters["dp_world_size"]
    if names.step is not None and names.step != step:
        raise _refusal(folder, f"its name says step {names.step} and its files say step {step}")
    if 3 in names.stages:
        _check_all_ranks(folder, model_files, ranks, kind="model")
    if names.stages != (0,):
        _check_all_ranks(folder, optimizer_files, ranks, kind="optimizer")
    stages = 1
    pipeline: dict[str, Any] = {}
    if names.has_layers:
        stages = _count(first["mp_world_size"], "mp_world_size")
        pipeline = {"pipeline": describe_pipeline(files, stages=stages)}
    global_size = None  # the steps were not all alike
    if step and samples % step == 0:
        global_size = samples // step
    ds_config = first["ds_config"]
    stage = 0
    if names.stages != (0,):
        stage = _stage_in(folder, optimizer_files[0], names)
    return {
        "step": step,
        "samples": samples,
        "layout": {
            "world_size": ranks * stages,
            "pipe_size": stages,
            "global_size": global_size,
        },
        **pipeline,
        "versions": {"deepspeed": str(first["ds_version"])},
        "config": {
            "run": {"name": folder.parent.name},
            "zero": {"stage": stage},
            "precision": {"dtype": _dtype(ds_config), "states": _states(ds_config)},
        },
    }


def _files_by_rank(files: CheckpointFiles, pattern: re.Pattern[str]) -> dict[int, str]:
    """Map each data-parallel rank to its file, that of the first stage in a pipeline."""
    found: dict[int, str] = {}
    for (rank, _), name in files.named(pattern).items():
        found.setdefault(rank, name)
    return found


def _check_all_ranks(folder: Path, files: Mapping[int, str], ranks: int, *, kind: str) -> None:
    """Raise StorageError unless every rank has its file. Only the first missing one is looked for:
    the number of ranks is from a file without a checksum, and may be huge.
    """
    for rank in range(ranks):
        if rank not in files:
            raise _refusal(
                folder, f"{ranks} ranks wrote it, and there is no {kind} file of rank {rank}"
            )
    if len(files) != ranks:
        raise _refusal(folder, f"{ranks} ranks wrote it, and there are {len(files)} {kind} files")


def _read(file: Path) -> Any:
    try:
        return read_or_explain(file, mmap=True)
    except StorageError as error:
        raise _refusal(file.parent, str(error)) from error


def _count(value: Any, name: str) -> int:
    """Return the value of a counter; raises ValueError if it cannot be one."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


# Section of DeepSpeed's JSON -> type of weights.
_HALF: Final = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


def _dtype(ds_config: Any) -> str:
    if not isinstance(ds_config, Mapping):
        return "fp32"
    for key, dtype in _HALF.items():
        section = ds_config.get(key)
        if isinstance(section, Mapping) and section.get("enabled"):
            return dtype
    return "fp32"


def _states(ds_config: Any) -> str:
    """Return what a run config calls `precision.states`."""
    if not isinstance(ds_config, Mapping):
        return "fp32"
    for key, dtype in _HALF.items():
        section = ds_config.get(key)
        if isinstance(section, Mapping) and section.get(f"{dtype}_master_weights_and_grads"):
            return "bf16" if section.get("bf16_optimizer_states") else f"{dtype}_weights"
    return "fp32"


def _refusal(folder: Path, reason: str) -> StorageError:
    return StorageError(
        f"{folder}: it cannot be read without a manifest: {reason}; name another checkpoint "
        f"[{UNVERIFIED}]"
    )
