"""Names for `export --hf`: those that the model itself gives for Hugging Face's loaders, by its method ``hf_names()``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from framework.assembly.targets import call_factory
from framework.config.base import Object
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.train.saved import SavedCheckpoint


def hf_names(checkpoint: SavedCheckpoint, *, stored: Collection[str]) -> dict[str, str]:
    """Our name -> Hugging Face's, for everything that is stored, and for further names of it; of a checkpoint with a manifest.

    The checkpoint's model is built on torch's meta device, where it takes no memory, and asked.

    Raises:
        ConfigError: it cannot be built, has no such method, or its names are not whole; kinds ``hf-names-missing`` and
            ``hf-names-wrong``.
    """
    model = RunConfig.model_validate(checkpoint.manifest["config"]).model
    if isinstance(model, Object):
        raise _refused("missing", checkpoint, f"{model.object} was handed over from Python, and nobody can ask it here",
                       "name the model in the config (model.target)")  # fmt: skip
    with torch.device("meta"):
        built: Any = call_factory(model.factory(), key="model")
    asked = getattr(built, "hf_names", None)
    if not callable(asked):
        raise _refused("missing", checkpoint, f"{type(built).__name__} has no method hf_names()",
                       "give it one that returns {its name of a weight: Hugging Face's}, or leave --hf out")  # fmt: skip
    names = asked()
    wrong = _wrong(names, stored)
    if wrong:
        raise _refused("wrong", checkpoint, f"hf_names() of {type(built).__name__} {wrong}", "mend it, or leave --hf out")
    return dict(names)


def _wrong(names: Any, stored: Collection[str]) -> str:
    """What keeps the names from being used; nothing where they can be."""
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        return "does not return a dict of text to text: its architecture has no counterpart, or it is not one"
    if missing := [name for name in stored if name not in names]:
        return f"lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    first: dict[str, str] = {}
    for name in stored:
        if first.setdefault(names[name], name) != name:
            return f"gives {first[names[name]]} and {name} one name, {names[name]}"
    return ""


def _refused(kind: str, checkpoint: SavedCheckpoint, reason: str, fix: str) -> ConfigError:
    return ConfigError(Problem(kind=f"hf-names-{kind}", key="--hf", reason=reason, fix=fix, file=str(checkpoint.path)))
