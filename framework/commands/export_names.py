"""Names for `export --hf`: those that the model itself gives for Hugging Face's loaders, by its method
``hf_names()``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.saved import SavedCheckpoint
from framework.config.base import Object, Target
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.setup.targets import call_factory


def hf_names(checkpoint: SavedCheckpoint, *, stored: Collection[str], trust: str | None = None) -> dict[str, str]:
    """Our name -> Hugging Face's, for everything that is stored, and for further names of it; of a checkpoint with a
    manifest.

    The checkpoint's model is built on torch's meta device, where it takes no memory, and asked. A model that is
    transformers' own has its names already.

    Args:
        checkpoint: whoever wrote its manifest must not choose what is called here: of itself it names a built-in model
            only.
        stored: the names in it.
        trust: the folder whose manifest may name any code, as the user gave it.

    Raises:
        ConfigError: it cannot be built, has no such method, or its names are not whole; kinds ``target-not-trusted``,
            ``hf-names-missing`` and ``hf-names-wrong``.
    """
    try:
        model = RunConfig.model_validate(checkpoint.manifest["config"]).model
    except ValueError:  # pydantic's error is one
        raise _refused(
            "missing",
            checkpoint,
            "its manifest does not hold a run config of this release",
            "export with the release that wrote it, or leave --hf out",
        ) from None
    if isinstance(model, Object):
        raise _refused(
            "missing",
            checkpoint,
            f"{model.object} was handed over from Python, and nobody can ask it here",
            "name the model in the config (model.target)",
        )
    if isinstance(model, Target):
        _refuse_untrusted(model, checkpoint, trust)
    with torch.device("meta"):
        built: Any = call_factory(model.factory(), key="model")
    asked = getattr(built, "hf_names", None)
    if not callable(asked) and _is_of_transformers(built):
        return {name: name for name in stored}
    if not callable(asked):
        raise _refused(
            "missing",
            checkpoint,
            f"{type(built).__name__} has no method hf_names()",
            "give it one that returns {its name of a weight: Hugging Face's}, or leave --hf out",
        )
    names = asked()
    if names is None and not isinstance(model, Target):
        raise _refused(
            "missing",
            checkpoint,
            f"a {model.kind} of this shape has no counterpart in transformers that stores its weights in the same form",
            "leave --hf out",
        )
    wrong = _wrong(names, stored)
    if wrong and not isinstance(model, Target):
        raise _refused("wrong", checkpoint, f"the names of model.kind {model.kind} {wrong}", "leave --hf out")
    if wrong:
        raise _refused(
            "wrong", checkpoint, f"hf_names() of {type(built).__name__} {wrong}", "mend it, or leave --hf out"
        )
    return dict(names)


def _refuse_untrusted(model: Target, checkpoint: SavedCheckpoint, trust: str | None) -> None:
    places = (checkpoint.path, checkpoint.folder, checkpoint.folder.absolute().parent)
    if trust is None:
        reason = f"the manifest names code of its own, model.target = {model.target}, which export would run"
    elif Path(trust).resolve() not in [place.resolve() for place in places]:
        reason = f"--trust names {trust}, and this checkpoint is in another folder"
    else:
        return
    raise ConfigError(
        Problem(
            kind="target-not-trusted",
            key="--hf",
            reason=reason,
            file=str(checkpoint.path),
            fix=f"if you trust whoever wrote the folder, give --trust {checkpoint.path}; or leave --hf out",
        )
    )


def _is_of_transformers(built: Any) -> bool:
    return any(cls.__module__.partition(".")[0] == "transformers" for cls in type(built).__mro__)


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
