"""Which runs may go on from a checkpoint: those whose arithmetic is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from framework.checkpoint.resume_rules import must_not_differ, rule_of
from framework.checkpoint.saved import SavedCheckpoint
from framework.checkpoint.saved_config import completed, flat
from framework.errors import MISSING, ConfigError, Problem, show_value

_EMA: Final = "training.ema"
_OBJECT_ARGS: Final = ("optimizer.args.",)
# Those whose arithmetic a run is made of.
_VERSIONS: Final = ("dsf-trainer", "deepspeed", "torch")


def check_resumable(
    checkpoint: SavedCheckpoint,
    *,
    config: Mapping[str, Any],
    global_size: int,
    steps_per_epoch: int,
    data: Mapping[str, Any],
) -> None:
    """Refuse to resume what would train with other numbers than the config says.

    Where the work is done may differ: other ranks, another ZeRO stage, pipeline or precision, other micro-batches.

    Args:
        checkpoint: what is resumed from.
        config: of this run, resolved.
        global_size: samples per step.
        steps_per_epoch: steps in one pass over the data.
        data: what this run's own checkpoints say of its training data (`framework.setup.wiring.description`).

    Raises:
        ConfigError: with one problem for every key that differs.
    """
    problem = _other_steps(checkpoint, global_size) or _other_data(checkpoint, steps_per_epoch, data)
    problems = [*filter(None, [problem]), *_other_config(checkpoint, config)]
    if problems:
        raise ConfigError(problems)


def _other_steps(checkpoint: SavedCheckpoint, global_size: int) -> Problem | None:
    """The place in the data is counted in steps."""
    saved = checkpoint.manifest["layout"]["global_size"]
    if saved is None and checkpoint.step:
        return Problem(
            kind="resume-global-size",
            key="batch.global_size",
            value=global_size,
            reason=f"the checkpoint {checkpoint.path} counts {checkpoint.manifest['samples']:,} samples in "
            f"{checkpoint.step:,} steps, so its steps were not all alike, and its place in the data cannot be told",
            fix="take the weights alone with checkpoint.init_weights",
        )
    if saved not in (None, global_size):
        return Problem(
            kind="resume-global-size",
            key="batch.global_size",
            value=global_size,
            reason=f"the checkpoint {checkpoint.path} was trained with {saved} samples per step, and "
            "its place in the data is counted in such steps",
            fix=f"set batch.global_size: {saved}",
        )
    return None


def _other_data(checkpoint: SavedCheckpoint, steps_per_epoch: int, data: Mapping[str, Any]) -> Problem | None:
    """The order of the samples is a function of how many there are. An older checkpoint says less, and is believed."""
    saved = checkpoint.manifest
    stated = ""
    if saved.get("steps_per_epoch", steps_per_epoch) != steps_per_epoch:
        stated = (
            f"its epochs had {saved['steps_per_epoch']} steps and now they have {steps_per_epoch}: the training data "
            "has another size"
        )
    elif _differ(saved, data, "num_train_samples"):
        stated = (
            f"its training data had {saved['num_train_samples']:,} samples and now has {data['num_train_samples']:,}"
        )
    elif _differ(saved, data, "data_sha256"):
        stated = "its training data had other tokens, by the checksums of their files"
    if not stated:
        return None
    return Problem(
        kind="resume-data-differs",
        key="checkpoint.resume",
        value=str(checkpoint.path),
        reason=f"{stated}, so its place in the data means other samples",
        fix="restore the data, or start afresh under another run.name",
    )


def _differ(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    return None not in (saved.get(name), now.get(name)) and saved[name] != now[name]


def _other_config(checkpoint: SavedCheckpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    if not checkpoint.verified:  # there is no config to be compared
        return
    saved = checkpoint.manifest["config"]
    before, now = flat(completed(saved)), flat(config)
    unsaid = _OBJECT_ARGS if "args" not in (saved.get("optimizer") or {}) else ()  # an older release did not note them
    for key in sorted(before.keys() | now.keys()):
        if key.startswith(unsaid):
            continue
        if before.get(key) != now.get(key) and must_not_differ(key, saved=before, now=now):
            how = f"with {show_value(before[key])}" if key in before else "without it"
            yield Problem(
                kind="resume-config-differs",
                key=key,
                value=now.get(key, MISSING),
                reason=f"the checkpoint {checkpoint.path} was trained {how}",
                fix="restore it, or start afresh under another run.name",
            )


def check_reachable(checkpoint: SavedCheckpoint, *, total_steps: int) -> None:
    """Refuse a step beyond the end of the run where only DeepSpeed's file says so: the schedule is brought there step
    by step.

    Raises:
        ConfigError: kind ``resume-beyond-end``.
    """
    if not checkpoint.verified and checkpoint.step > total_steps:
        raise ConfigError(
            Problem(
                kind="resume-beyond-end",
                key="training.max_steps",
                value=total_steps,
                reason=f"the checkpoint {checkpoint.path} says that it stands at step {checkpoint.step:,}, beyond the "
                "end of this run",
                fix="set it higher, or take the weights alone with checkpoint.init_weights",
            )
        )


def describe_changes(checkpoint: SavedCheckpoint, *, config: Mapping[str, Any]) -> list[str]:
    """What has changed since the save and holds from now on, as ``key: before -> now``; and what becomes of an average.

    Args:
        checkpoint: what is resumed from, which `check_resumable` let pass.
        config: of this run, resolved.
    """
    if not checkpoint.verified:  # nobody knows with what it was trained
        return []
    saved = completed(checkpoint.manifest["config"])
    before, now = flat(saved), flat(config)
    stated = [
        f"{key}: {show_value(before.get(key))} -> {show_value(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and rule_of(key) == "applied" and not key.startswith(_EMA)
    ]
    kept, keeps = (one.get("training", {}).get("ema") for one in (saved, config))
    if keeps and not kept:
        stated.append(f"{_EMA}: the moving average begins with the weights of step {checkpoint.step}")
    elif kept and not keeps:
        stated.append(f"{_EMA}: the moving average of the weights is dropped")
    elif kept != keeps:
        stated.append(f"{_EMA}: {_inline(kept)} -> {_inline(keeps)}")
    return stated


def describe_versions(checkpoint: SavedCheckpoint, *, versions: Mapping[str, str | None]) -> str:
    """Which releases wrote it, where they are not those that go on; empty where they are the same, or nobody knows."""
    saved = checkpoint.versions
    changed = [name for name in _VERSIONS if saved.get(name) and saved[name] != versions.get(name)]
    return ", ".join(f"{name} {saved[name]} -> {versions.get(name)}" for name in changed)


def _inline(settings: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in settings.items()) + "}"
