"""After training: the checkpoint that a path names, the config in its manifest, and its model as a plain module."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import UNVERIFIED, absence_at, newest_at
from framework.config.base import Object, Target
from framework.config.run_config import RunConfig
from framework.errors import ConfigError

KEY: Final = "CHECKPOINT"


def load(
    source: str | Path,
    model: Any = None,
    *,
    weights: Literal["trained", "ema"] = "trained",
    trust: bool = False,
    allow_unverified: bool = False,
) -> torch.nn.Module:
    """The trained model as a plain `torch.nn.Module`, on the CPU and in evaluation mode; its weights are fp32 where the
    checkpoint has fp32 copies and the model is built in fp32.

    Args:
        source: a run folder (its newest checkpoint) or ``.../global_step<N>``, written by any ZeRO stage, pipeline or
            number of ranks; its checksums are verified.
        model: a module, a list of layers, or a callable that builds one, as `fit` takes it; left out: the model that
            the checkpoint's own config names.
        weights: as trained, or their moving average (``training.ema``).
        trust: call code that the checkpoint names as ``model.target``; the built-in kinds need no trust.
        allow_unverified: read what DeepSpeed wrote without a manifest; `model` is needed then.

    Raises:
        ConfigError: there is no such checkpoint, its model cannot be built, or other weights belong to it.
        StorageError: the checkpoint is damaged.
    """
    checkpoint = find_source(str(source), key="load", allow_unverified=allow_unverified)
    if model is None:
        trusted = str(checkpoint.path) if trust else None
        config = config_to_build(checkpoint, trusted, "model", fix="hand over model=..., or trust=True")
    else:
        config = RunConfig()
    return module_of(checkpoint, config, model, average=weights == "ema")


def module_of(
    checkpoint: SavedCheckpoint, config: RunConfig, model: Any = None, *, average: bool = False
) -> torch.nn.Module:
    """Build the model of a config, or `model`, and give it the checkpoint's weights or their average."""
    with contextlib.redirect_stdout(io.StringIO()):  # where it is imported, DeepSpeed tells which device it found
        from framework.engine.weights import checkpoint_weights, put_weights
        from framework.setup.parts import model_builder
    built = model_builder(config, model)()
    put_weights(built, checkpoint_weights(checkpoint, average=average), source=str(checkpoint.path))
    return built.eval()


def find_source(path: str, *, allow_unverified: bool, key: str = KEY) -> SavedCheckpoint:
    """The checkpoint that a path names, or the newest one of the run that it names; a ConfigError of kind
    ``checkpoint-not-found`` or ``checkpoint-unverified`` where there is none.
    """
    found = newest_at(path, key=key, allow_unverified=allow_unverified)
    if found is None:
        fix = "name a .../global_step<N> folder or a run folder that holds one"
        raise ConfigError.of("checkpoint-not-found", absence_at(path, key=key), fix, key=key, value=path)
    return found


def config_in(checkpoint: SavedCheckpoint) -> RunConfig:
    """The run config that a checkpoint's manifest holds; a ConfigError where there is none of this release."""
    refused = partial(ConfigError.of, key=KEY, value=str(checkpoint.path))
    if not checkpoint.verified:
        reason = "without a manifest nothing in it says what model it is of"
        raise refused(UNVERIFIED, reason, "name another one, or call framework.load(..., model=...)")
    try:
        return RunConfig.model_validate(checkpoint.manifest["config"])
    except ValueError:  # pydantic's error is one
        reason = "its manifest does not hold a run config of this release"
        raise refused("manifest-config", reason, "use the release that wrote it") from None


def config_to_build(checkpoint: SavedCheckpoint, trust: str | None, *sections: str, fix: str = "") -> RunConfig:
    """The checkpoint's config, of which `sections` may be built; `trust` and `fix` as for `refuse_untrusted`.

    Raises:
        ConfigError: kinds ``object-not-given``, ``target-not-trusted``, and those of `config_in`.
    """
    config = config_in(checkpoint)
    if isinstance(config.model, Object):
        reason, handed = "it was handed over from Python and exists only there", config.model.object
        fix = "hand it over again: framework.load(..., model=...)"
        raise ConfigError.of("object-not-given", reason, fix, "model.object", handed)
    for name in sections:
        refuse_untrusted(getattr(config, name), checkpoint, trust, key=f"{name}.target", fix=fix)
    return config


def refuse_untrusted(
    section: Any, checkpoint: SavedCheckpoint, trust: str | None, *, key: str, fix: str = "", or_else: str = ""
) -> None:
    """Refuse code that a manifest names: whoever wrote it must not choose what is called here.

    Args:
        section: of the config that the manifest holds.
        trust: the folder of the checkpoint, where the user has named it to allow that.
        key: what would call it.
        fix: how to trust it; left out: ``--trust``.
        or_else: another way out.
    """
    if not isinstance(section, Target):
        return
    places = (checkpoint.path, checkpoint.folder, checkpoint.folder.absolute().parent)
    reason = f"the manifest names code of its own, {section.target}, which would be run"
    if trust is not None:
        if Path(trust).resolve() in [place.resolve() for place in places]:
            return
        reason = f"--trust names {trust}, and this checkpoint is in another folder"
    way_out = f"if you trust whoever wrote the folder, {fix or f'give --trust {checkpoint.path}'}{or_else}"
    raise ConfigError.of("target-not-trusted", reason, way_out, key=key, file=str(checkpoint.path))
