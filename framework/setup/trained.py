"""After training: the checkpoint that a path names, the config in its manifest, and its model as a
plain module.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import UNVERIFIED, absence_at, newest_at
from framework.checkpoint.state.reader import MergedWeights
from framework.config.base import Object, Target
from framework.config.run_config import RunConfig
from framework.engine.weights import checkpoint_weights, put_weights
from framework.errors import ConfigError
from framework.models.experts import MixtureOfExperts
from framework.models.formats import as_fp32
from framework.setup.adapters import merged_model
from framework.setup.components import model_builder

KEY: Final = "CHECKPOINT"


def load(
    source: str | Path,
    model: Any = None,
    *,
    weights: Literal["trained", "ema"] = "trained",
    trust: bool = False,
) -> torch.nn.Module:
    """The trained model as a plain `torch.nn.Module`, on the CPU and in evaluation mode; adapters
    are merged.

    Args:
        source: a run folder (its newest checkpoint) or ``.../global_step<N>``, of any layout.
        model: as `fit` takes it; left out: the model that the checkpoint's own config names.
        weights: as trained, or their moving average (``training.ema``).
        trust: call code that the checkpoint names as ``model.target``; the built-in kinds need no
            trust.

    Raises:
        ConfigError: there is no such checkpoint, its model cannot be built, or other weights belong
            to it.
        StorageError: the checkpoint is damaged.
    """
    checkpoint = find_source(str(source), key="load")
    config = RunConfig()
    if model is None or checkpoint.has_adapters:
        sections = ("model",) if model is None else ()
        trusted = str(checkpoint.path) if trust else None
        config = saved_config(checkpoint, *sections, trust=trusted, otherwise="hand over model=...")
    return module_of(checkpoint, config, model, average={"trained": False, "ema": True}[weights])


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
    build = model_builder(config, model)
    if checkpoint.has_adapters:
        return merged_model(
            MergedWeights(checkpoint, average=average), config, build, base=base
        ).eval()
    built = as_fp32(build())
    put_weights(built, checkpoint_weights(checkpoint, average=average), source=str(checkpoint.path))
    return built.eval()


def module_to_ask(
    checkpoint: SavedCheckpoint, config: RunConfig, *, average: bool
) -> torch.nn.Module:
    """As `module_of`, on this rank's device; and experts have room for all tokens: what becomes of
    one must not depend on those that are read with it.
    """
    model = module_of(checkpoint, config, average=average)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.shape = module.shape.model_copy(update={"eval_capacity_factor": None})
    if torch.cuda.is_available():
        return model.cuda(int(os.environ.get("LOCAL_RANK", "0")))
    return model


def find_source(path: str, *, allow_unverified: bool = False, key: str = KEY) -> SavedCheckpoint:
    """The checkpoint that a path names, or the newest one of the run that it names; a ConfigError
    of kind ``checkpoint-not-found`` or ``checkpoint-unverified`` where there is none.
    """
    found = newest_at(path, key=key, allow_unverified=allow_unverified)
    if found is None:
        fix = "name a .../global_step<N> folder or a run folder that holds one"
        raise ConfigError.of(
            "checkpoint-not-found", absence_at(path, key=key), fix, key=key, value=path
        )
    return found


def saved_config(
    checkpoint: SavedCheckpoint,
    *sections: str,
    trust: str | None = None,
    key: str = KEY,
    otherwise: str = "name another checkpoint",
    kind: str | None = None,
) -> RunConfig:
    """The config in a checkpoint's manifest, of which `sections` can be built here, and may be:
    whoever wrote it must not choose what is called, but where the user trusts its folder, `trust`.

    Raises:
        ConfigError: at `key`, of `kind` or ``target-not-trusted``; `otherwise` is what can be done
            instead.
    """
    refused = partial(ConfigError.of, key=key, file=str(checkpoint.path))
    lost = kind or "object-not-given"
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
        raise refused(lost, reason, f"use the release that wrote it, or {otherwise}") from None
    places = [
        place.resolve()
        for place in (checkpoint.path, checkpoint.folder, checkpoint.folder.absolute().parent)
    ]
    for name in sections:
        section = getattr(config, name)
        if isinstance(section, Object):
            reason = f"{section.object} was handed over from Python, and nobody can ask it here"
            raise refused(lost, reason, f"name it in the config ({name}.target), or {otherwise}")
        if isinstance(section, Target) and (trust is None or Path(trust).resolve() not in places):
            reason = (
                f"the manifest names code of its own, {name}.target = {section.target}, "
                "which would be run"
            )
            fix = (
                f"if you trust whoever wrote the folder, give --trust {checkpoint.path} (in "
                "Python trust=True)"
            )
            raise refused("target-not-trusted", reason, f"{fix}; or {otherwise}")
    return config
