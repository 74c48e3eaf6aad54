"""Resume rules: which runs may go on from a checkpoint, which keys may differ, and when its state
has to be moved.

One table for all keys of the run config: DeepSpeed restores most of what an optimizer, a schedule
and a loss scale were given from the checkpoint, so that a value that was changed in the config
would be lost without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.run_config import RunConfig
from framework.errors import MISSING, ConfigError, Problem, show_value

Rule = Literal["applied", "refused", "irrelevant"]
"""applied: the new value holds from the next step on, and the run says so. refused: it must be the
same. irrelevant: it has nothing to do with what goes on.
"""

# Of what is passed through to DeepSpeed, irrelevant is what measures and tells.
_KEYS: Final[Mapping[Rule, Sequence[str]]] = json.loads(
    Path(__file__).with_name("resume_rules.json").read_text(encoding="utf-8")
)
RULES: Final[Mapping[str, Rule]] = {key: rule for rule, keys in _KEYS.items() for key in keys}
"""Key, or section with all that is in it and not named by itself -> what becomes of a
difference.
"""

# Compared as samples per step: any one of the three keys of `batch` may be left out.
_COMPARED_BY_LAYOUT: Final = "batch.global_size"
# They belong to fp16, and go with it when the precision changes.
_OF_ONE_KIND: Final = "precision."
_EMA: Final = "training.ema"
_OBJECT_ARGS: Final = "optimizer.args."
_DATA: Final = {
    "steps_per_epoch": "its epochs had {} steps and now they have {}: the training data has "
    "another size",
    "num_train_samples": "its training data had {:,} samples and now has {:,}",
    "lanes": "its stream was read in {} lanes and now has {}",
    "data_sha256": "its training data had other tokens, by the checksums of their files",
}
_WEIGHTS_ALONE: Final = "take the weights alone with checkpoint.init_weights"
# Those whose arithmetic a run is made of.
_VERSIONS: Final = ("dsf-trainer", "deepspeed", "torch")


def rule_of(key: str) -> Rule:
    """The rule of a dotted key; what no release knows, or no longer, is refused."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((RULES[prefix] for prefix in prefixes if prefix in RULES), "refused")


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved config with the keys that an older version did not know at their defaults, which it
    trained with.
    """
    try:
        return RunConfig.model_validate(dict(config)).to_dict()
    except ValueError:  # it knew a key that is gone: the comparison will name it
        return config


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values; lists are values."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    return {
        key: value
        for name, part in values.items()
        for key, value in _flat(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def check_resumable(
    checkpoint: SavedCheckpoint,
    *,
    config: Mapping[str, Any],
    global_size: int,
    steps_per_epoch: int,
    data: Mapping[str, Any],
) -> None:
    """Refuse to resume what would train with other numbers than the config says.

    Where the work is done may differ: other ranks, another ZeRO stage, pipeline or precision, other
    micro-batches.

    Args:
        config: of this run, resolved.
        global_size: samples per step.
        steps_per_epoch: steps in one pass over the data.
        data: what this run's own checkpoints say of its training data (`Prepared.description`).

    Raises:
        ConfigError: with one problem for every key that differs.
    """
    problem = _other_steps(checkpoint, global_size) or _other_data(
        checkpoint, steps_per_epoch, data
    )
    problems = [*filter(None, [problem]), *_other_config(checkpoint, config)]
    if problems:
        raise ConfigError(problems)


def _other_steps(checkpoint: SavedCheckpoint, global_size: int) -> Problem | None:
    """The place in the data is counted in steps."""
    saved = checkpoint.manifest["layout"]["global_size"]
    if saved == global_size or (saved is None and not checkpoint.step):
        return None
    if saved is None:
        reason = (
            f"counts {checkpoint.manifest['samples']:,} samples in {checkpoint.step:,} steps, so "
            "its steps were not all alike, and its place in the data cannot be told"
        )
    else:
        reason = (
            f"was trained with {saved} samples per step, and its place in the data is "
            "counted in such steps"
        )
    return Problem(
        kind="resume-global-size",
        key="batch.global_size",
        value=global_size,
        reason=f"the checkpoint {checkpoint.path} {reason}",
        fix=f"set batch.global_size: {saved}" if saved else _WEIGHTS_ALONE,
    )


def _other_data(
    checkpoint: SavedCheckpoint, steps_per_epoch: int, data: Mapping[str, Any]
) -> Problem | None:
    """The order of the samples is a function of how many there are. An older checkpoint says less,
    and is believed.
    """
    saved = checkpoint.manifest
    now = {**data, "steps_per_epoch": steps_per_epoch}
    differing = [
        name for name in _DATA if name in saved and None not in (saved[name], now.get(name))
    ]
    first = next((name for name in differing if saved[name] != now[name]), None)
    if first is None:
        return None
    return Problem(
        kind="resume-data-differs",
        key="checkpoint.resume",
        value=str(checkpoint.path),
        reason=f"{_DATA[first].format(saved[first], now[first])}, so its place in the data means "
        "other samples",
        fix="restore the data, or start afresh under another run.name",
    )


def _other_config(checkpoint: SavedCheckpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    if not checkpoint.verified:  # there is no config to be compared
        return
    saved = checkpoint.manifest["config"]
    before = _flat(_completed(saved))
    now = _flat(config)
    has_args = "args" in (saved.get("optimizer") or {})  # an older release did not note them
    for key in sorted(before.keys() | now.keys()):
        if key == _COMPARED_BY_LAYOUT or (key.startswith(_OBJECT_ARGS) and not has_args):
            continue
        if key.startswith(_OF_ONE_KIND) and not (key in before and key in now):
            continue
        if before.get(key) != now.get(key) and rule_of(key) == "refused":
            if key in before:
                how = f"with {show_value(before[key])}"
            else:
                how = "without it"
            yield Problem(
                kind="resume-config-differs",
                key=key,
                value=now.get(key, MISSING),
                reason=f"the checkpoint {checkpoint.path} was trained {how}",
                fix="restore it, or start afresh under another run.name",
            )


def check_reachable(checkpoint: SavedCheckpoint, *, total_steps: int) -> None:
    """Refuse a step beyond the end of the run that only DeepSpeed's file tells: a schedule is
    brought there by steps.

    Raises:
        ConfigError: kind ``resume-beyond-end``.
    """
    if not checkpoint.verified and checkpoint.step > total_steps:
        stands = f"the checkpoint {checkpoint.path} says that it stands at step {checkpoint.step:,}"
        raise ConfigError.of(
            kind="resume-beyond-end",
            key="training.max_steps",
            value=total_steps,
            reason=f"{stands}, beyond the end of this run",
            fix=f"set it higher, or {_WEIGHTS_ALONE}",
        )


def describe_changes(checkpoint: SavedCheckpoint, *, config: Mapping[str, Any]) -> list[str]:
    """Describe the changes since the save that hold from now on, as ``key: before -> now``; and
    what becomes of an average. `config` is that of this run, resolved, which `check_resumable` let
    pass.
    """
    if not checkpoint.verified:  # nobody knows with what it was trained
        return []
    saved = _completed(checkpoint.manifest["config"])
    before = _flat(saved)
    now = _flat(config)
    stated = [
        f"{key}: {show_value(before.get(key))} -> {show_value(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and rule_of(key) == "applied"
        and not key.startswith(_EMA)
    ]
    kept, keeps = (one.get("training", {}).get("ema") for one in (saved, config))
    if keeps and not kept:
        stated.append(
            f"{_EMA}: the moving average begins with the weights of step {checkpoint.step}"
        )
    elif kept and not keeps:
        stated.append(f"{_EMA}: the moving average of the weights is dropped")
    elif kept != keeps:
        shown = (
            "{" + ", ".join(f"{key}: {value}" for key, value in one.items()) + "}"
            for one in (kept, keeps)
        )
        stated.append(f"{_EMA}: {' -> '.join(shown)}")
    return stated


def describe_versions(checkpoint: SavedCheckpoint, *, versions: Mapping[str, str | None]) -> str:
    """Describe the releases that wrote a checkpoint and are not those that go on; empty if the
    same, or unknown.
    """
    saved = checkpoint.versions
    changed = [name for name in _VERSIONS if saved.get(name) and saved[name] != versions.get(name)]
    return ", ".join(f"{name} {saved[name]} -> {versions.get(name)}" for name in changed)


_OFFLOADS: Final = ("offload_optimizer", "offload_param")
# Of what lies on NVMe, DeepSpeed copies the files of a rank from the checkpoint to wherever the run
# has its drive.
_NOT_IN_NVME_FILES: Final = frozenset(
    {"nvme_path", "pin_memory", "pipeline_read", "pipeline_write"}
)


def needs_resharding(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> bool:
    """Check whether a checkpoint lies on disk in another way than this run, by the `description`
    that its own checkpoints have, would write it.

    DeepSpeed reads its own files back where nothing has changed that decides which numbers lie in
    which file; otherwise every parameter is looked up by its name
    (`framework.checkpoint.state.reader`).
    """
    before = _arrangement(checkpoint.manifest)
    now = _arrangement(description)
    return not checkpoint.verified or before != now or _are_split_otherwise(checkpoint, description)


def describe_resharding(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> str:
    """Describe the differences in layout, as ``key: before -> now``; of a checkpoint without a
    manifest, its layout.
    """
    before = _arrangement(checkpoint.manifest)
    now = _arrangement(description)
    if not checkpoint.verified:
        return f"{before['ranks']} ranks, ZeRO {before['zero.stage']}, {before['precision.dtype']}"
    # what only one has goes with the rest
    both = (key for key in before if None not in (before[key], now.get(key)))
    stated = [
        f"{key}: {show_value(before[key])} -> {show_value(now[key])}"
        for key in both
        if before[key] != now[key]
    ]
    return ", ".join(
        [
            *stated,
            *(["other parts of weights"] if _are_split_otherwise(checkpoint, description) else []),
        ]
    )


def _are_split_otherwise(checkpoint: SavedCheckpoint, description: Mapping[str, Any]) -> bool:
    """Check whether as many tensor ranks have other parts; a description from before the model is
    built says nothing of them.
    """
    before = checkpoint.manifest.get("tensor")
    now = description.get("tensor")
    return None not in (before, now) and before != now


def check_movable(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> None:
    """Refuse to move state out of, or into, the files of DeepSpeed's NVMe swapper, which nobody
    else reads or writes.

    Raises:
        ConfigError: kind ``resume-nvme-moved``.
    """
    if not needs_resharding(checkpoint, description=description):
        return
    stated = describe_resharding(checkpoint, description=description)
    restore = "restore ranks, zero, parallel and precision"
    for manifest, holder, fix in (
        (checkpoint.manifest, f"the checkpoint {checkpoint.path} holds", f"{restore} as they were"),
        (description, "this run keeps", f"{restore}, or {_WEIGHTS_ALONE}"),
    ):
        zero = _completed(manifest["config"]).get("zero") or {}
        for section in _OFFLOADS:
            if (zero.get(section) or {}).get("device") == "nvme":
                same = "which can be resumed in the very same layout only"
                reason = f"{holder} state on NVMe (zero.{section}), {same}: {stated}"
                value = str(checkpoint.path)
                raise ConfigError.of(
                    kind="resume-nvme-moved",
                    key="checkpoint.resume",
                    value=value,
                    reason=reason,
                    fix=fix,
                )


def _arrangement(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides which numbers lie in which file of DeepSpeed's."""
    layout = manifest["layout"]
    config = _completed(manifest["config"])
    bounds = (manifest.get("pipeline") or {}).get("bounds")
    return {
        "ranks": layout["world_size"],
        "pipeline stages": layout["pipe_size"],
        # Older checkpoints know of neither.
        "tensor-parallel ranks": layout.get("tensor_size", 1),
        "sequence-parallel ranks": layout.get("sequence_size", 1),
        "expert-parallel ranks": layout.get("expert_size", 1),
        "cut": None if bounds is None else list(bounds),
        "precision.dtype": (config.get("precision") or {}).get("dtype"),
        **{f"zero.{key}": value for key, value in _spread(config.get("zero") or {}).items()},
    }


def _spread(zero: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``zero`` that decide how it flattens, cuts and places.

    DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py `_round_robin_reorder`, stage3.py
    `_create_fp16_sub_groups` and `_create_fp32_partitions`.
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
                f"{section}.{key}": value
                for key, value in _flat(offload).items()
                if key not in _NOT_IN_NVME_FILES
            }
    return found
