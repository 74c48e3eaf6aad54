"""Whether a checkpoint lies on disk as this run would write it, or has to be moved, and what may not be.

DeepSpeed reads its own files back where nothing has changed that decides which numbers lie in which file; otherwise
every parameter is looked up by its name (`framework.checkpoint.state.reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from framework.checkpoint.saved import SavedCheckpoint
from framework.checkpoint.saved_config import completed, flat
from framework.errors import ConfigError, Problem, show_value

_OFFLOADS: Final = ("offload_optimizer", "offload_param")
# Of what lies on NVMe, DeepSpeed copies the files of a rank from the checkpoint to wherever the run has its drive.
_NOT_IN_NVME_FILES: Final = frozenset({"nvme_path", "pin_memory", "pipeline_read", "pipeline_write"})


def needs_resharding(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> bool:
    """Whether a checkpoint lies on disk in another way than this run would write it.

    Args:
        checkpoint: what is resumed from.
        description: what this run's own checkpoints say about it.
    """
    return not checkpoint.verified or _arrangement(checkpoint.manifest) != _arrangement(description)


def describe_resharding(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> str:
    """What is different in the layout, as ``key: before -> now``; of a checkpoint without a manifest, which layout it
    has.
    """
    before, now = _arrangement(checkpoint.manifest), _arrangement(description)
    if not checkpoint.verified:
        return f"{before['ranks']} ranks, ZeRO {before['zero.stage']}, {before['precision.dtype']}"
    both = (key for key in before if None not in (before[key], now.get(key)))  # what only one has goes with the rest
    return ", ".join(
        f"{key}: {show_value(before[key])} -> {show_value(now[key])}" for key in both if before[key] != now[key]
    )


def check_movable(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> None:
    """Refuse to move what lies in the files of DeepSpeed's NVMe swapper, or has to go there: it is read and written by
    no one else.

    Raises:
        ConfigError: kind ``resume-nvme-moved``.
    """
    if not needs_resharding(checkpoint, description=description):
        return
    for manifest, reason in (
        (checkpoint.manifest, f"the checkpoint {checkpoint.path} holds"),
        (description, "this run keeps"),
    ):
        zero = completed(manifest["config"]).get("zero") or {}
        for section in _OFFLOADS:
            if (zero.get(section) or {}).get("device") == "nvme":
                raise ConfigError(
                    Problem(
                        kind="resume-nvme-moved",
                        key="checkpoint.resume",
                        value=str(checkpoint.path),
                        reason=f"{reason} state on NVMe (zero.{section}), which can be resumed in the very same "
                        f"layout only: {describe_resharding(checkpoint, description=description)}",
                        fix="restore ranks, zero, parallel and precision, or take the weights alone with "
                        "checkpoint.init_weights"
                        if manifest is description
                        else "restore ranks, zero, parallel and precision as they were",
                    )
                )


def _arrangement(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which numbers lie in which file of DeepSpeed's."""
    layout, config = manifest["layout"], completed(manifest["config"])
    bounds = (manifest.get("pipeline") or {}).get("bounds")
    return {
        "ranks": layout["world_size"],
        "pipeline stages": layout["pipe_size"],
        "cut": None if bounds is None else list(bounds),
        "precision.dtype": (config.get("precision") or {}).get("dtype"),
        **{f"zero.{key}": value for key, value in _spread(config.get("zero") or {}).items()},
    }


def _spread(zero: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``zero`` that decide how it flattens, cuts and places; the others are sizes of buffers, and when what
    is sent.

    DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py `_round_robin_reorder`, stage3.py `_create_fp16_sub_groups` and
    `_create_fp32_partitions`.
    """
    stage = zero.get("stage", 0)
    found: dict[str, Any] = {"stage": stage}
    if stage in (1, 2):
        found["round_robin_gradients"] = zero.get("round_robin_gradients")
    if stage == 3:
        found["sub_group_size"] = zero.get("sub_group_size")
    for section in _OFFLOADS if stage else ():
        offload = zero.get(section) or {}
        found[f"{section}.device"] = offload.get("device", "none")
        found[f"{section}.ratio"] = offload.get("ratio")
        if offload.get("device") == "nvme":
            found |= {
                f"{section}.{key}": value for key, value in flat(offload).items() if key not in _NOT_IN_NVME_FILES
            }
    return found
