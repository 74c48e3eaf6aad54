"""The user's own code: objects that a program hands over, with the config that describes them, and
targets that a config names as ``package.module:name`` with keyword arguments.

If the object of a section is handed over, the section may still hold its other keys: ``data:
{num_workers: 2}``. An error in the user's module becomes one problem that names the key, the reason
and the line of code.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from framework.config.base import Factory, Object, is_plain, plain_values
from framework.config.data import DataObject
from framework.config.load import Source, config_from_values, missing_objects, read_values
from framework.config.optimizer import OptimizerObject
from framework.config.run_config import RunConfig
from framework.data.splits import Splits, given_splits
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError, FrameworkError, Problem
from framework.models.layers import Layer


class Recipe(Protocol):
    """A recipe of a layer, as DeepSpeed's `LayerSpec` is."""

    def build(self) -> Any:
        """Build the layer."""


LayerList = Sequence[torch.nn.Module | Layer | Recipe | Callable[[Any], Any]]
ModelSource = torch.nn.Module | LayerList | Callable[[], torch.nn.Module | LayerList]
# From parameters, or from (name, parameter) pairs if the argument is called `named_parameters`.
MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]

# What `fit` and `open_engine` take as a config: the classes, nested dicts, or the path of a file.
ConfigSource = RunConfig | Mapping[str, Any] | str | os.PathLike[str]

# Keys with which a section names its part.
_TAGS: Final = ("kind", "target", "object")


@dataclass(frozen=True)
class Objects:
    """Objects handed over from Python; None: the config names the part.

    Attributes:
        model: a module or a list of layers, or a callable that builds one (at ZeRO stage 3 it is
            then built already spread).
        train_data, eval_data: datasets, map-style or streams, of evaluation also several by name;
            `train_data` may be the pair.
        task: a Task, or a callable ``loss(outputs, targets)``.
        optimizer: a callable that takes parameters and returns an optimizer, for example
            ``partial(SGD, lr=0.1)``.
        callbacks: objects that are called at the events of the run, after the config's callbacks.
        scheduler: a callable that takes the optimizer and returns a schedule with the interface of
            torch's LRScheduler.
        metrics: of torchmetrics: a Metric, a MetricCollection, or several by name.
    """

    model: ModelSource | None = None
    train_data: Any = None
    eval_data: Any = None
    task: Any = None
    optimizer: MakeOptimizer | None = None
    callbacks: Sequence[Any] = ()
    scheduler: MakeSchedule | None = None
    metrics: Any = None

    @cached_property
    def splits(self) -> Splits | None:
        """Datasets that were handed over, or None. They are examined once.

        Raises:
            ConfigError: they are no datasets, or only evaluation data was handed over.
        """
        if self.eval_data is not None and self.train_data is None:
            reason = "it was handed over without train_data"
            fix = "hand over train_data as well"
            raise ConfigError.of("train-data-not-given", reason, fix, "eval_data")
        if self.train_data is None:
            return None
        return given_splits(self.train_data, self.eval_data)


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
    names_of = getattr(objects.metrics, "keys", None)  # of a mapping, or a MetricCollection
    names = [type(objects.metrics).__name__]
    if callable(names_of):
        names = [str(name) for name in names_of()]
    return described.with_given_metrics(names)


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


def type_name(value: Any) -> str:
    """Return ``module.name`` of a class or function, or of the type of any other value."""
    if inspect.isroutine(value) or inspect.isclass(value):
        kind = value
    else:
        kind = type(value)
    return f"{kind.__module__ or 'builtins'}.{kind.__qualname__}"


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


def load_target(path: str, *, key: str) -> Any:
    """Import ``package.module:name``; the current folder is searched as well.

    Raises:
        ConfigError: the module does not exist, fails while it is imported, or has no such name.
    """
    module_name, _, dotted_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    # A script without `if __name__ == "__main__"` exits, perhaps with code 0.
    except (Exception, SystemExit) as error:
        raise _import_failed(error, module_name, path, key=key) from error
    walked = module_name
    for name in dotted_name.split("."):
        value = _attribute(value, name, walked, path, key=key)
        walked = f"{walked}.{name}"
    return value


def _import_failed(error: BaseException, module_name: str, path: str, *, key: str) -> ConfigError:
    missing = None
    if isinstance(error, ModuleNotFoundError):
        missing = error.name
    if not missing:
        reason = f"importing it failed: {summary(error)}"
        return ConfigError.of("target-import-failed", reason, "correct the module", key, path)
    if module_name == missing or module_name.startswith(f"{missing}."):
        reason = f"there is no module {missing}"
        fix = f"check the spelling, or start where {module_name.split('.')[0]} can be imported"
        return ConfigError.of("target-not-found", reason, fix, key, path)
    reason = f"importing it needs {missing}{_place(error)}"
    fix = f"install {missing}, or check its spelling"
    return ConfigError.of("target-import-failed", reason, fix, key, path)


def _attribute(holder: Any, name: str, holder_name: str, path: str, *, key: str) -> Any:
    """Return an attribute of a module or class on the way to a target. Raises ConfigError."""
    try:
        return getattr(holder, name)
    except AttributeError as error:
        from deepspeed_lint.text.typos import nearest

        public_names = [known for known in dir(holder) if not known.startswith("_")]
        guess = nearest(name, public_names)
        fix = "check the spelling"
        if guess:
            fix = f"did you mean '{guess}'?"
        reason = f"{holder_name} has no {name}"
        raise ConfigError.of("target-not-found", reason, fix, key, path) from error
    except Exception as error:  # modules that import on first use
        reason = f"reading {name} failed: {summary(error)}"
        fix = "correct the module"
        raise ConfigError.of("target-import-failed", reason, fix, key, path) from error


def call_factory(factory: Factory, *, key: str) -> Any:
    """Import a target and call it with its arguments.

    Raises:
        ConfigError: it cannot be imported, does not take these arguments, or fails.
    """
    function = load_target(factory.path, key=f"{key}.target")
    check_arguments(function, factory.kwargs, key=key)
    try:
        return function(**factory.kwargs)
    except FrameworkError:
        raise
    except (Exception, SystemExit) as error:
        raise call_failed(error, factory.path, key=key) from error


def call_failed(error: BaseException, path: str, *, key: str) -> ConfigError:
    """Return the problem of a target that raised when it was called."""
    reason = f"calling it failed: {summary(error)}"
    fix = f"check {key}.args and the code"
    return ConfigError.of("target-failed", reason, fix, f"{key}.target", path)


def takes(function: Any, kwargs: Mapping[str, Any], *, positional: int = 0) -> bool:
    """Return whether `check_arguments` accepts the call; True if there is no signature to check."""
    try:
        check_arguments(function, kwargs, key="", positional=positional)
    except ConfigError:
        return False
    return True


def check_arguments(
    function: Any, kwargs: Mapping[str, Any], *, key: str, positional: int = 0
) -> None:
    """Refuse an object that cannot be called with `positional` values and these keyword
    arguments.
    """
    if not callable(function):
        value = f"a {type(function).__name__}"
        fix = "name a class or a function"
        raise ConfigError.of(
            "target-not-callable", "it cannot be called", fix, f"{key}.target", value
        )
    try:
        # A decorator may supply arguments of the function beneath it: the signature of the outer
        # one counts, which is called.
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return
    try:
        signature.bind(*repeat(None, positional), **kwargs)
    except TypeError as error:
        raise ConfigError.of(
            "target-args", str(error), f"it takes {signature}", f"{key}.args", dict(kwargs)
        ) from error


def check_handed_over(function: Any, *, key: str, call: str, fix: str, num_values: int = 0) -> None:
    """Refuse an object from Python that cannot be called with `num_values` values and nothing else.

    Args:
        function: a callable.
        key: the argument that it was handed over as.
        call: the call as it will be, such as ``(outputs, targets)``.
        fix: what to hand over instead.
        num_values: how many values the call has.
    """
    try:
        check_arguments(function, {}, key=key, positional=num_values)
    except ConfigError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        reason = f"it will be called as {name}{call}: {error.problems[0].reason}"
        raise ConfigError.of("object-args", reason, fix, key, name) from error


def summary(error: BaseException) -> str:
    """Return an exception in one line, with the innermost place in the code."""
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
    else:
        message = str(error)
    text = type(error).__name__
    message = " ".join(message.split())[:300]
    if message:
        text += f": {message}"
    return text + _place(error)


def _place(error: BaseException) -> str:
    """Return the place where an error was raised, as `` (file:line)``; frames of this module and of
    the import machinery do not count.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_import = frame.filename.startswith("<frozen ") or frame.filename == importlib.__file__
        if not is_import and frame.filename != __file__:
            return f" ({frame.filename}:{frame.lineno})"
    return ""
