"""Reads a trained model: the checkpoint at a path, the config in its manifest, and its model as a
plain module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import UNVERIFIED, absence_at, at_step, newest_at
from framework.checkpoint.state.reader import MergedWeights
from framework.checkpoint.trust import why_not_trusted
from framework.config.base import Object, targets_in
from framework.config.run_config import RunConfig
from framework.engine.weights import checkpoint_weights, put_weights
from framework.errors import ConfigError
from framework.models.experts import MixtureOfExperts
from framework.models.prepare_model import as_fp32
from framework.setup.adapters import merged_model
from framework.setup.components import model_builder

KEY: Final = "CHECKPOINT"


def load(
    source: str | Path,
    model: Any = None,
    *,
    step: int | Literal["best"] | None = None,
    weights: Literal["trained", "ema"] = "trained",
    trust: bool = False,
) -> torch.nn.Module:
    """Return the trained model as a plain `torch.nn.Module`, on the CPU and in evaluation mode.

    Adapters are merged.

    Args:
        source: a run folder (its newest checkpoint) or ``.../global_step<N>``, of any layout.
        model: as `fit` takes it; left out: the model that the checkpoint's own config names.
        step: of the run: a number, or ``best``, by the metric of `checkpoint.keep_best`; left out:
            the newest.
        weights: as trained, or their moving average (``training.ema``).
        trust: call code that the checkpoint names as ``model.target``, where this user has not
            trained it below the present folder, and does not list it (``dsf trust``); the built-in
            kinds need no trust.

    Raises:
        ConfigError: there is no such checkpoint, its model cannot be built, or the model has other
            weights than the checkpoint.
        StorageError: the checkpoint is damaged.
    """
    checkpoint = find_source(str(source), step=step_name(step), key="load")
    config = RunConfig()
    if model is None or checkpoint.has_adapters:
        sections = ("model",) if model is None else ()
        trusted = str(checkpoint.path) if trust else None
        config = saved_config(checkpoint, *sections, trust=trusted, otherwise="hand over model=...")
    return module_of(checkpoint, config, model, average=is_average(weights, key="load"))


def is_average(weights: str, *, key: str) -> bool:
    """Return whether the moving average of the weights is meant.

    Raises:
        ConfigError: kind ``wrong-value``: neither is.
    """
    if weights not in ("trained", "ema"):
        raise ConfigError.of("wrong-value", "no such weights", "write trained or ema", key, weights)
    return weights == "ema"


def step_name(step: int | str | None) -> str | None:
    """Return a step as `find_source` takes it."""
    if step is None:
        return None
    return str(step)


def module_of(
    checkpoint: SavedCheckpoint,
    config: RunConfig,
    model: Any = None,
    *,
    average: bool = False,
    base: str | None = None,
) -> torch.nn.Module:
    """Build the model of a config, or `model`, with the checkpoint's weights or their average;
    `base` as for export.
    """
    build = model_builder(config, model, is_trained=False)
    if checkpoint.has_adapters:
        merged = MergedWeights(checkpoint, average=average)
        return merged_model(merged, config, build, base=base).eval()
    module = as_fp32(build())
    weights = checkpoint_weights(checkpoint, average=average)
    put_weights(module, weights, source=str(checkpoint.path))
    return module.eval()


def module_to_ask(
    checkpoint: SavedCheckpoint, config: RunConfig, model: Any = None, *, average: bool
) -> torch.nn.Module:
    """Build the model as `module_of` does, on this rank's device, for answers to requests.

    Experts have room for all tokens: the answer for one must not depend on the tokens beside it.
    """
    asked = module_of(checkpoint, config, model, average=average)
    for module in asked.modules():
        if isinstance(module, MixtureOfExperts):
            module.shape = module.shape.model_copy(update={"eval_capacity_factor": None})
    if torch.cuda.is_available():
        return asked.cuda(int(os.environ.get("LOCAL_RANK", "0")))
    return asked


def find_source(
    path: str, *, step: str | None = None, allow_unverified: bool = False, key: str = KEY
) -> SavedCheckpoint:
    """Return the checkpoint at a path, or of the run there: the newest one, or that of a step or
    ``best``.

    Raises:
        ConfigError: kind ``checkpoint-not-found`` or ``checkpoint-unverified``.
    """
    path = at_step(path, step, key=key)
    checkpoint = newest_at(path, key=key, allow_unverified=allow_unverified)
    if checkpoint is None:
        reason = absence_at(path, key=key)
        fix = "name a .../global_step<N> folder or a run folder that holds one"
        raise ConfigError.of("checkpoint-not-found", reason, fix, key=key, value=path)
    return checkpoint


def saved_config(
    checkpoint: SavedCheckpoint,
    *sections: str,
    trust: str | None = None,
    key: str = KEY,
    otherwise: str = "name another checkpoint",
    kind: str | None = None,
) -> RunConfig:
    """Return the config in a checkpoint's manifest, with sections that can and may be built here.

    A target in the manifest is code that the author of the folder chooses. It is refused unless the
    user trusts the folder, by name or as `framework.checkpoint.trust` describes.

    Args:
        checkpoint: with the manifest.
        sections: names of sections that the caller builds, those within others dotted.
        trust: path of a folder that the user trusts.
        key: of the problems.
        otherwise: the fix that does without these sections.
        kind: of the problems; otherwise one for each reason.

    Raises:
        ConfigError: at `key`, of `kind` or ``target-not-trusted``.
    """
    refused = partial(ConfigError.of, key=key, file=str(checkpoint.path))
    missing_kind = kind or "object-not-given"
    if not checkpoint.verified:
        raise refused(
            kind or UNVERIFIED,
            "without a manifest nothing in it says what model it is of",
            otherwise,
        )
    try:
        config = RunConfig.model_validate(checkpoint.manifest["config"])
    except ValueError:  # pydantic's error is one
        reason = "its manifest does not hold a run config of this release"
        raise refused(
            missing_kind, reason, f"use the release that wrote it, or {otherwise}"
        ) from None
    is_trusted = _is_trusted(checkpoint, trust)
    for name in sections:
        section = _section_at(config, name)
        if isinstance(section, Object):
            reason = f"{section.object} was handed over from Python, and cannot be asked here"
            fix = f"name it in the config ({name}.target), or {otherwise}"
            raise refused(missing_kind, reason, fix)
        target = next(targets_in(section), None)
        if target is not None and not is_trusted:
            _refuse_untrusted(checkpoint, f"{name}.target = {target}", refused, otherwise)
    return config


def _section_at(config: RunConfig, name: str) -> Any:
    """Return the section of a dotted name; names of metrics may have dots themselves."""
    section: Any = config
    for part in name.split(".", 2):
        if isinstance(section, Mapping):
            section = section[part]
        else:
            section = getattr(section, part)
    return section


def _refuse_untrusted(
    checkpoint: SavedCheckpoint,
    shown: str,
    refused: Callable[[str, str, str], ConfigError],
    otherwise: str,
) -> None:
    """Refuse a target, as `shown`, in the manifest of a folder that the user has not listed."""
    why = why_not_trusted(checkpoint)
    if not why:
        return
    reason = f"the manifest names code of its own, {shown}, which would be run, and {why}"
    fix = (
        f"if you trust the author of the folder, give --trust {checkpoint.path} (in "
        "Python trust=True), or list it once: dsf trust FOLDER"
    )
    raise refused("target-not-trusted", reason, f"{fix}; or {otherwise}")


def _is_trusted(checkpoint: SavedCheckpoint, trust: str | None) -> bool:
    """Check whether the folder that the user trusts is the checkpoint's, or one around it."""
    if trust is None:
        return False
    folders = (checkpoint.path, checkpoint.folder, checkpoint.folder.absolute().parent)
    return Path(trust).resolve() in [folder.resolve() for folder in folders]
