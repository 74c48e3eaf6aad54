"""The arguments of `fit` and `open_engine`: a config from Python, and sections that describe the
objects that are handed over with it.

If the object of a section is handed over, the section may still hold its other keys: ``data:
{num_workers: 2}``.
"""

from __future__ import annotations

import builtins
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from framework.config.base import Object, is_plain, plain_values
from framework.config.data import DataObject
from framework.config.load import Source, config_from_values, missing_objects, read_values
from framework.config.optimizer import OptimizerObject
from framework.config.run_config import RunConfig
from framework.data.splits import Splits
from framework.errors import ConfigError, Problem
from framework.setup.user_code import ConfigSource, MakeOptimizer, Objects, type_name

# Keys with which a section names its part.
_TAGS: Final = ("kind", "target", "object")


def read_given(config: ConfigSource) -> tuple[RunConfig | Mapping[str, Any], Source]:
    """Return a config that was handed over, which is read if it is the path of a file, and the
    places of its values.
    """
    if isinstance(config, (str, os.PathLike)):
        return read_values(config)
    return config, Source()


def names_section(values: RunConfig | Mapping[str, Any], name: str) -> bool:
    """Check whether a config has a section, rather than its defaults."""
    if isinstance(values, RunConfig):
        return name in values.model_fields_set
    return name in values


def config_with_objects(
    values: RunConfig | Mapping[str, Any], objects: Objects, *, source: Source | None = None
) -> RunConfig:
    """Validate a config from Python; sections of objects that are handed over name these.

    Raises:
        ConfigError: with every problem found.
        UsageError: it is no config at all.
    """
    source = source or Source()
    # The default model reads images of the default data: it hardly ever fits the user's own data.
    if (
        objects.train_data is not None
        and objects.model is None
        and not names_section(values, "model")
    ):
        fix = "hand over model=..., or name one in the config's model section"
        raise ConfigError.of(
            "model-not-given", "train_data was handed over, and no model", fix, "model"
        )
    if isinstance(values, Mapping):
        problems = missing_objects(values, given=_sections(objects))
        located = [source.locate(problem) for problem in problems]
        if located:
            raise ConfigError(located)
        values = _with_sections(plain_values(values), objects)
    config = config_from_values(values, source=source)
    _refuse_devices_in_notebook(config)
    return describe_objects(config, objects)


def _refuse_devices_in_notebook(config: RunConfig) -> None:
    key = "run.world_size"
    num_devices = config.run.world_size or 1
    if num_devices == 1:
        key = "parallel"
        num_devices = math.prod(config.parallel.sizes().values()) * config.parallel.expert
    has_too_few = num_devices > int(os.environ.get("WORLD_SIZE", "1"))
    if has_too_few and hasattr(builtins, "__IPYTHON__"):
        reason = "a notebook is one process with one device"
        fix = f"start a script: deepspeed --num_gpus {num_devices} train.py"
        raise ConfigError.of("devices-of-notebook", reason, fix, key, num_devices)


def describe_objects(config: RunConfig, objects: Objects) -> RunConfig:
    """Return the config with sections that describe the objects that are handed over."""
    sections = _sections(objects)
    changes: dict[str, Any] = {}
    for name in ("model", "task", "scheduler"):
        if name in sections:
            changes[name] = Object(**sections[name])
    if objects.splits is not None:
        changes |= _changes_of_data(config, objects.splits, sections["data"])
    if "optimizer" in sections:
        lr = None
        if isinstance(config.optimizer, OptimizerObject):
            lr = config.optimizer.lr
        changes["optimizer"] = OptimizerObject(**{"lr": lr, **sections["optimizer"]})
    described = config.model_copy(update=changes)
    if objects.metrics is None:
        return described
    return described.with_given_metrics(_names_of(objects.metrics))


def _names_of(metrics: Any) -> list[str]:
    """Return the names of metrics that were handed over: their keys, or the class of one."""
    keys = getattr(metrics, "keys", None)  # of a mapping, or a MetricCollection
    if not callable(keys):
        return [type(metrics).__name__]
    return [str(name) for name in keys()]


def _changes_of_data(config: RunConfig, splits: Splits, section: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that datasets change: data, evaluation and perhaps batch.

    Settings of a DataLoader that was handed over hold where the config leaves them open.
    """
    changes: dict[str, Any] = {}
    settings = dict(splits.taken)
    micro_size = settings.pop("micro_size", None)
    eval_size = settings.pop("eval_size", None)
    if "num_workers" in config.data.model_fields_set:
        settings.pop("num_workers", None)
    configured = config.data.model_dump(include={*DataObject.model_fields} - {"object"})
    changes["data"] = DataObject(**configured | settings | section)
    batch = config.batch
    evaluation = config.evaluation
    is_open = batch.micro_size is None and "batch.micro_size" not in config.auto
    if is_open and None in (batch.global_size, batch.accumulation_steps):
        changes["batch"] = batch.model_copy(update={"micro_size": micro_size})
    batch_size = evaluation.batch_size or eval_size
    changes["evaluation"] = evaluation.model_copy(update={"batch_size": batch_size})
    return changes


def _with_sections(values: dict[str, Any], objects: Objects) -> dict[str, Any]:
    """Return the values with the sections of the objects.

    A section that names something else stays; `describe_objects` puts the object in its place.
    """
    for name, description in _sections(objects).items():
        section = values.get(name, {})
        if not isinstance(section, Mapping) or any(tag in section for tag in _TAGS):
            continue
        config_lr = section.get("lr")
        object_lr = description.get("lr")
        if name == "optimizer" and None not in (config_lr, object_lr) and config_lr != object_lr:
            reason = f"the optimizer that was handed over has lr={object_lr:g}"
            raise ConfigError.of("object-lr-differs", reason, "give one", "optimizer.lr", config_lr)
        values[name] = {**section, **description}
    return values


def _sections(objects: Objects) -> dict[str, dict[str, Any]]:
    """Return the config section that describes each object, by the section's name."""
    sections: dict[str, dict[str, Any]] = {}
    if objects.model is not None:
        sections["model"] = {"object": type_name(objects.model)}
    splits = objects.splits
    if splits is not None:
        sections["data"] = {"object": type_name(splits.train)}
        if splits.num_train is not None:
            sections["data"]["train_samples"] = splits.num_train
    if objects.task is not None:
        sections["task"] = {"object": type_name(objects.task)}
    if objects.scheduler is not None:
        function = getattr(objects.scheduler, "func", objects.scheduler)
        sections["scheduler"] = {"object": type_name(function)}
    if objects.optimizer is not None:
        sections["optimizer"] = _optimizer_section(objects.optimizer)
    return sections


def _optimizer_section(optimizer: MakeOptimizer) -> dict[str, Any]:
    """Return the section of an optimizer: the class or function that makes it and, of a
    `functools.partial`, the arguments that JSON can hold. A resumed run must have the same ones.
    """
    made_by = getattr(optimizer, "func", optimizer)  # the function in a `partial`
    keywords: Mapping[str, Any] = {}
    if isinstance(optimizer, partial):
        keywords = optimizer.keywords
    args = {}
    for name, value in keywords.items():
        if name != "lr" and is_plain(value):
            args[name] = plain_values(value)
    section: dict[str, Any] = {"object": type_name(made_by), "args": args}
    # An lr that is no plain number (a tensor) is left to the optimizer.
    lr: Any = keywords.get("lr")
    if _is_rate(lr):
        section["lr"] = float(lr)
    return section


def _is_rate(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value >= 0


# Arguments of `fit`.
_KNOWN: Final = (
    "config",
    "model",
    "train_data",
    "eval_data",
    "task",
    "optimizer",
    "scheduler",
    "callbacks",
)
# Arguments that `fit` does not take -> what to write instead.
_INSTEAD: Final[Mapping[str, str]] = json.loads(
    Path(__file__).with_name("arguments.json").read_text(encoding="utf-8")
)


def refuse_unknown_arguments(
    names: Iterable[str], *, further: Sequence[Any] = (), function: str = "fit"
) -> None:
    """Refuse arguments that `fit`, or `open_engine`, does not take.

    Args:
        names: keyword arguments that it does not take.
        further: positional arguments after the config.
        function: which of the two.

    Raises:
        ConfigError: kind ``unknown-argument``, with a problem for each name.
    """
    if further:
        types = ", ".join(type(argument).__name__ for argument in further)
        reason = "only the config is taken by its place, as the first argument"
        known = _KNOWN[1:] if function == "fit" else _KNOWN[1:-1]  # a loop calls its own callbacks
        fix = f"write {function}(config, {'=..., '.join(known)}=...)"
        raise ConfigError.of("unknown-argument", reason, fix, function, types)
    problems = [
        Problem("unknown-argument", f"{function}() takes no such argument", _fix(name), name)
        for name in names
    ]
    if problems:
        raise ConfigError(problems)


def _fix(name: str) -> str:
    """Return what to write instead of an argument that `fit` does not take."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name in RunConfig.model_fields:
        return f"set the section {name} in the config"
    from deepspeed_lint.text.typos import nearest
    from framework.config.explain import homes_of

    homes = list(homes_of(name, RunConfig))
    if homes:
        return f"set {' or '.join(homes[:3])} in the config"
    guess = nearest(name, _KNOWN)
    if guess:
        return f"did you mean '{guess}'?"
    return f"known: {', '.join(_KNOWN)}; everything else is set in the config"
