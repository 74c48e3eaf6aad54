"""Resume rules: which runs may go on from a checkpoint, which keys may differ, and when its state
has to be moved.

One table for all keys of the run config: DeepSpeed restores most of what an optimizer, a schedule
and a loss scale were given from the checkpoint, so that a value that was changed in the config
would be lost without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from framework.checkpoint.manifest import SavedCheckpoint, zenflow_of
from framework.config.run_config import RunConfig
from framework.config.training import CHANGEABLE
from framework.errors import MISSING, ConfigError, Problem, show_value

Rule = Literal["applied", "refused", "irrelevant"]
"""applied: the new value holds from the next step on, and the run prints that. refused: it must be
the same. irrelevant: a resumed run does not depend on it.
"""

# Of the keys passed through to DeepSpeed, those that measure and report are irrelevant.
_KEYS: Final[Mapping[Rule, Sequence[str]]] = json.loads(
    Path(__file__).with_name("resume_rules.json").read_text(encoding="utf-8")
)
RULES: Final[dict[str, Rule]] = {}
"""Key, or section (for all its keys without a rule of their own) -> rule."""
for _rule, _keys in _KEYS.items():
    RULES.update(dict.fromkeys(_keys, _rule))

# Compared as samples per step: any one of the three keys of `batch` may be left out.
_COMPARED_BY_LAYOUT: Final = "batch.global_size"
# Keys of one precision alone, such as the loss scale of fp16, go when the precision changes.
_OF_ONE_KIND: Final = "precision."
_EMA: Final = "training.ema"
_STATES: Final = "precision.states"
# What an optimizer's state is in by `precision.states`: the weights that it steps, and its moments.
_TYPES_OF_STATES: Final = {
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "bf16_weights": ("bf16", "fp32"),
    "fp16_weights": ("fp16", "fp32"),
}
_OBJECT_ARGS: Final = "optimizer.args."
# What older releases wrote for each optimizer that a `functools.partial` makes.
_OLD_PARTIAL: Final = ("optimizer.object", "functools.partial")
_DATA: Final = {
    "steps_per_epoch": "its epochs had {} steps and now they have {}: the training data has "
    "another size",
    "num_train_samples": "its training data had {:,} samples and now has {:,}",
    "lanes": "its stream was read in {} lanes and now has {}",
    "data_sha256": "its training data had other tokens, by the checksums of their files",
}
_WEIGHTS_ALONE: Final = "take the weights alone with checkpoint.init_weights"
# The packages that do a run's arithmetic.
_VERSIONS: Final = ("dsf-trainer", "deepspeed", "torch")


def rule_of(key: str) -> Rule:
    """Return the rule of a dotted key: its own, or that of the innermost section with one. Unknown
    and former keys are refused.
    """
    prefix = key
    while prefix:
        if prefix in RULES:
            return RULES[prefix]
        prefix = prefix.rpartition(".")[0]
    return "refused"


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved config with its missing keys at their defaults: an older version did not know
    them and trained with these.
    """
    try:
        return RunConfig.model_validate(dict(config)).to_dict()
    except ValueError:  # it knew a key that is gone: the comparison will name it
        return config


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: dotted keys -> values; lists are values."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    flat = {}
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        flat.update(_flat(value, key))
    return flat


def check_resumable(
    checkpoint: SavedCheckpoint,
    *,
    config: Mapping[str, Any],
    global_size: int,
    steps_per_epoch: int,
    data: Mapping[str, Any],
) -> None:
    """Refuse to resume a run that would train with other numbers than the config sets.

    Ranks, ZeRO stage, pipeline, precision and micro-batches may differ.

    Args:
        config: of this run, resolved.
        global_size: samples per step.
        steps_per_epoch: steps in one pass over the data.
        data: the description of the training data in this run's own checkpoints
            (`Prepared.description`).

    Raises:
        ConfigError: with one problem for every key that differs.
    """
    problems = []
    problem = _other_steps(checkpoint, global_size)
    if problem is None:
        problem = _other_data(checkpoint, steps_per_epoch, data)
        if problem is not None and _is_allowed("data", config):
            problem = _other_stream(checkpoint, data, problem)
    if problem is not None:
        problems.append(problem)
    problems += _rounded_states(checkpoint, config)
    problems += _other_config(checkpoint, config)
    if problems:
        raise ConfigError(problems)


def _other_steps(checkpoint: SavedCheckpoint, global_size: int) -> Problem | None:
    """Return the problem of another global batch size: the place in the data is counted in
    steps.
    """
    saved = checkpoint.manifest["layout"]["global_size"]
    if saved == global_size or (saved is None and not checkpoint.step):
        return None
    if saved is None:
        reason = (
            f"counts {checkpoint.manifest['samples']:,} samples in {checkpoint.step:,} steps, so "
            "its steps were not all alike, and its place in the data is not known"
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
    """Return the problem of other training data: the order of the samples is a function of their
    number. Facts that an older checkpoint lacks are not compared.
    """
    saved = checkpoint.manifest
    now = {**data, "steps_per_epoch": steps_per_epoch}
    for name, sentence in _DATA.items():
        if saved.get(name) is None or now.get(name) is None or saved[name] == now[name]:
            continue
        difference = sentence.format(saved[name], now[name])
        return Problem(
            kind="resume-data-differs",
            key="checkpoint.resume",
            value=str(checkpoint.path),
            reason=f"{difference}, so its place in the data means other samples",
            fix=(
                "restore the data, or go on at the same step of this with "
                "checkpoint.allow_changed: [data]"
            ),
        )
    return None


def _other_stream(
    checkpoint: SavedCheckpoint, data: Mapping[str, Any], problem: Problem
) -> Problem | None:
    """Return the problem of other data that the run allows; None unless one of both is a stream,
    in which a step has no place by its number.
    """
    if not (checkpoint.manifest.get("lanes") or data.get("lanes")):
        return None
    reason = f"{problem.reason}, and a stream has a place only in itself"
    return replace(problem, reason=reason, fix=f"restore the data, or {_WEIGHTS_ALONE}")


def _is_allowed(key: str, config: Mapping[str, Any]) -> bool:
    """Check whether a key, or a section that it is in, is in ``checkpoint.allow_changed``."""
    if _is_averaged(key, config):
        return False
    allowed = (config.get("checkpoint") or {}).get("allow_changed") or ()
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _is_averaged(key: str, config: Mapping[str, Any]) -> bool:
    """Check whether the average of a schedule-free optimizer follows from a key: it is made with
    the rates and the share of all steps so far.
    """
    if (config.get("optimizer") or {}).get("kind") != "schedule_free":
        return False
    return key in ("optimizer.lr", "optimizer.betas") or key.startswith("scheduler")


def changed_keys(checkpoint: SavedCheckpoint, *, config: Mapping[str, Any]) -> list[str]:
    """List the keys in ``checkpoint.allow_changed`` that a checkpoint has otherwise and that are
    refused elsewhere: their saved values must not come back with its state.
    """
    return list(_allowed_changes(checkpoint, config))


def describe_allowed(checkpoint: SavedCheckpoint, *, config: Mapping[str, Any]) -> list[str]:
    """Describe what `changed_keys` lists, as ``key: before -> now``."""
    return list(_allowed_changes(checkpoint, config).values())


def _allowed_changes(checkpoint: SavedCheckpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """Map each key that `changed_keys` lists to ``key: before -> now``."""
    allowed = (config.get("checkpoint") or {}).get("allow_changed")
    if not allowed or not checkpoint.verified:
        return {}
    before = _flat(_with_defaults(checkpoint.manifest["config"]))
    now = _flat(config)
    changes = {}
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) == now.get(key) or rule_of(key) != "refused":
            continue
        if _is_allowed(key, config):
            changes[key] = f"{key}: {show_value(before.get(key))} -> {show_value(now.get(key))}"
    return changes


def _states_of(config: Mapping[str, Any]) -> str:
    """Return `precision.states` of a config, which older releases and fp32 do not have."""
    states: str = (config.get("precision") or {}).get("states", "fp32")
    return states


def _rounded_states(checkpoint: SavedCheckpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of an optimizer's state that this run would round."""
    before = _states_of(checkpoint.manifest["config"])
    now = _states_of(config)
    saved_types = _TYPES_OF_STATES.get(before, ("unknown", "unknown"))
    pairs = zip(saved_types, _TYPES_OF_STATES[now], strict=True)
    if all(wanted in (saved, "fp32") for saved, wanted in pairs):
        return
    yield Problem(
        kind="resume-states-rounded",
        key=_STATES,
        value=now,
        reason=f"the checkpoint {checkpoint.path} holds the optimizer's state of {_STATES}: "
        f"{before}, which this run would round",
        fix=f"set {_STATES}: {before}, or {_WEIGHTS_ALONE}",
    )


def _means_the_same(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Check whether other values of a key are no other training, or are compared elsewhere."""
    if _is_kernel_of_torch(key, before, now):
        return True
    if key == _COMPARED_BY_LAYOUT or (key, before.get(key)) == _OLD_PARTIAL:
        return True
    is_of_both = key in before and key in now
    return key.startswith(_OF_ONE_KIND) and not is_of_both


def _other_config(checkpoint: SavedCheckpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each key with the rule ``refused`` that the checkpoint has otherwise."""
    if not checkpoint.verified:  # there is no config to be compared
        return
    saved = checkpoint.manifest["config"]
    before = _flat(_with_defaults(saved))
    now = _flat(config)
    has_args = "args" in (saved.get("optimizer") or {})  # an older release did not note them
    for key in _differing(before, now):
        if rule_of(key) != "refused" or _is_allowed(key, config):
            continue
        if key.startswith(_OBJECT_ARGS) and not has_args:
            continue
        if _means_the_same(key, before, now):
            continue
        if key in before:
            how = f"with {show_value(before[key])}"
        else:
            how = "without it"
        yield Problem(
            kind="resume-config-differs",
            key=key,
            value=now.get(key, MISSING),
            reason=f"the checkpoint {checkpoint.path} was trained {how}",
            fix=_fix_of(key, config),
        )


def _fix_of(key: str, config: Mapping[str, Any]) -> str:
    """Return what to do about a key that a checkpoint has otherwise."""
    is_averaged = _is_averaged(key, config)
    section = key.partition(".")[0]
    if section in ("scheduler", "data", "task"):
        key = section
    if re.match(CHANGEABLE, key) and not is_averaged:
        door = f"checkpoint.allow_changed: [{key}], which keeps the moments"
        return f"restore it, or go on with {door}"
    return f"restore it, or start afresh under another run.name ({_WEIGHTS_ALONE})"


def _is_kernel_of_torch(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Check whether a key chooses among kernels of torch's Adam, which have one state."""
    if key != "optimizer.implementation":
        return False
    return "deepspeed" not in (before.get(key), now.get(key))


def check_reachable(checkpoint: SavedCheckpoint, *, total_steps: int) -> None:
    """Refuse an unverified step beyond the end of the run: a schedule is advanced to it step by
    step, and DeepSpeed's file may have any number.

    Raises:
        ConfigError: kind ``resume-beyond-end``.
    """
    if not checkpoint.verified and checkpoint.step > total_steps:
        position = (
            f"the checkpoint {checkpoint.path} says that it stands at step {checkpoint.step:,}"
        )
        raise ConfigError.of(
            kind="resume-beyond-end",
            key="training.max_steps",
            value=total_steps,
            reason=f"{position}, beyond the end of this run",
            fix=f"set it higher, or {_WEIGHTS_ALONE}",
        )


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the keys with another value now than before, sorted."""
    keys = sorted(before.keys() | now.keys())
    return [key for key in keys if before.get(key) != now.get(key)]


def describe_changes(checkpoint: SavedCheckpoint, *, config: Mapping[str, Any]) -> list[str]:
    """Describe the changes since the save that hold from now on, as ``key: before -> now``; and
    the change of the moving average. `config` is that of this run, resolved, and has passed
    `check_resumable`.
    """
    if not checkpoint.verified:  # the config that it was trained with is unknown
        return []
    saved = _with_defaults(checkpoint.manifest["config"])
    before = _flat(saved)
    now = _flat(config)
    changes = []
    for key in _differing(before, now):
        if key.startswith(_EMA):
            continue
        is_applied = rule_of(key) == "applied" or _is_allowed(key, config)
        if is_applied or _is_kernel_of_torch(key, before, now):
            changes.append(f"{key}: {show_value(before.get(key))} -> {show_value(now.get(key))}")
    change_of_average = _change_of_average(
        saved.get("training", {}).get("ema"),
        config.get("training", {}).get("ema"),
        step=checkpoint.step,
    )
    if change_of_average:
        changes.append(f"{_EMA}: {change_of_average}")
    return changes


def _change_of_average(
    before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, step: int
) -> str:
    if now and not before:
        return f"the moving average begins with the weights of step {step}"
    if before and not now:
        return "the moving average of the weights is dropped"
    if before and now and before != now:
        return f"{_in_braces(before)} -> {_in_braces(now)}"
    return ""


def _in_braces(options: Mapping[str, Any]) -> str:
    pairs = [f"{key}: {value}" for key, value in options.items()]
    return "{" + ", ".join(pairs) + "}"


def describe_versions(checkpoint: SavedCheckpoint, *, versions: Mapping[str, str | None]) -> str:
    """Describe the releases that have changed since a checkpoint was written, as ``name before ->
    now``; empty if the same, or unknown.
    """
    saved = checkpoint.versions
    changed = [name for name in _VERSIONS if saved.get(name) and saved[name] != versions.get(name)]
    return ", ".join(f"{name} {saved[name]} -> {versions.get(name)}" for name in changed)


_OFFLOADS: Final = ("offload_optimizer", "offload_param")
# DeepSpeed copies a rank's files of its NVMe swapper from the checkpoint to the drive of the run,
# with any of these options.
_NOT_IN_NVME_FILES: Final = frozenset(
    {"nvme_path", "pin_memory", "pipeline_read", "pipeline_write"}
)


def needs_resharding(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> bool:
    """Check whether this run would lay a checkpoint out in another way. `description` is that of
    the run's own checkpoints.

    DeepSpeed reads its own files back as long as the numbers lie in the same files; otherwise every
    parameter is looked up by its name (`framework.checkpoint.state.reader`).
    """
    before = _arrangement(checkpoint.manifest)
    now = _arrangement(description)
    return not checkpoint.verified or before != now or _are_split_otherwise(checkpoint, description)


def describe_resharding(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> str:
    """Describe the differences in layout, as ``key: before -> now``; or the layout of a checkpoint
    without a manifest.
    """
    before = _arrangement(checkpoint.manifest)
    now = _arrangement(description)
    if not checkpoint.verified:
        return f"{before['ranks']} ranks, ZeRO {before['zero.stage']}, {before['precision.dtype']}"
    differences = []
    for key in before:
        if before[key] is None or now.get(key) is None:
            # A key that only one of the two has goes with the difference of another key.
            continue
        if before[key] != now[key]:
            differences.append(f"{key}: {show_value(before[key])} -> {show_value(now[key])}")
    if _are_split_otherwise(checkpoint, description):
        differences.append("other parts of weights")
    return ", ".join(differences)


def _are_split_otherwise(checkpoint: SavedCheckpoint, description: Mapping[str, Any]) -> bool:
    """Check whether tensor ranks hold other parts of the weights, as may be with the same number of
    ranks. False for a description from before the model is built, which does not have the parts.
    """
    before = checkpoint.manifest.get("tensor")
    now = description.get("tensor")
    return before is not None and now is not None and before != now


def check_movable(checkpoint: SavedCheckpoint, *, description: Mapping[str, Any]) -> None:
    """Refuse to move state that is made within a rank's share: columns that ZenFlow chooses, and
    moments of 8 bits.

    Raises:
        ConfigError: kind ``resume-zenflow-moved`` or ``resume-8bit-moved``.
    """
    if not needs_resharding(checkpoint, description=description):
        return
    differences = describe_resharding(checkpoint, description=description)
    restore = "restore ranks, zero, parallel and precision"

    def stays(kind: str, reason: str, fix: str) -> ConfigError:
        path = str(checkpoint.path)
        return ConfigError.of(kind, f"{reason}: {differences}", fix, "checkpoint.resume", path)

    or_weights_alone = f"{restore} as they were, or {_WEIGHTS_ALONE}"
    if any(zenflow_of(manifest) for manifest in (checkpoint.manifest, description)):
        reason = (
            "ZenFlow chooses columns within each rank's share, and keeps moments of those: its "
            "state goes on in the very same layout only"
        )
        raise stays("resume-zenflow-moved", reason, or_weights_alone)
    optimizer = checkpoint.manifest["config"].get("optimizer") or {}
    if optimizer.get("kind") == "adamw_8bit":
        reason = (
            "moments of 8 bits have a scale for each block of a rank's share: they go on in the "
            "very same layout only"
        )
        raise stays("resume-8bit-moved", reason, or_weights_alone)


def _arrangement(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide which numbers lie in which of DeepSpeed's files."""
    layout = manifest["layout"]
    config = _with_defaults(manifest["config"])
    bounds = (manifest.get("pipeline") or {}).get("bounds")
    arrangement = {
        "ranks": layout["world_size"],
        "pipeline stages": layout["pipe_size"],
        # Older checkpoints lack these three.
        "tensor-parallel ranks": layout.get("tensor_size", 1),
        "sequence-parallel ranks": layout.get("sequence_size", 1),
        "expert-parallel ranks": layout.get("expert_size", 1),
        "cut": None if bounds is None else list(bounds),
        "precision.dtype": (config.get("precision") or {}).get("dtype"),
        _STATES: _states_of(config),
    }
    for key, value in _arrangement_of_zero(config.get("zero") or {}).items():
        arrangement[f"zero.{key}"] = value
    if zenflow_of(manifest):  # counts micro-batches
        arrangement["batch.accumulation_steps"] = layout["accumulation_steps"]
    return arrangement


def _arrangement_of_zero(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``zero`` that decide how it flattens, cuts and places.

    DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py `_round_robin_reorder`, stage3.py
    `_create_fp16_sub_groups` and `_create_fp32_partitions`.
    """
    stage = zero.get("stage", 0)
    keys: dict[str, Any] = {"stage": stage}
    if not stage:
        return keys
    if stage in (1, 2):
        keys["round_robin_gradients"] = zero.get("round_robin_gradients")
    if stage == 3:
        keys["sub_group_size"] = zero.get("sub_group_size")
    for section in _OFFLOADS:
        keys |= _arrangement_of_offload(section, zero.get(section) or {})
    return keys


def _arrangement_of_offload(section: str, offload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an offload that decide how it cuts and places."""
    keys: dict[str, Any] = {
        f"{section}.device": offload.get("device", "none"),
        f"{section}.ratio": offload.get("ratio"),
    }
    zenflow = offload.get("zenflow") or {}
    if section == "offload_optimizer":
        keys[f"{section}.zenflow"] = bool(zenflow)
    for key, value in zenflow.items():
        if key != "select_every":
            keys[f"{section}.zenflow.{key}"] = value
    if offload.get("device") == "nvme":
        for key, value in _flat(offload).items():
            if key not in _NOT_IN_NVME_FILES:
                keys[f"{section}.{key}"] = value
    return keys
