"""The user's own code: objects that a program hands over, with the config that describes them, and
targets that a config names as ``package.module:name`` with keyword arguments.

A section of the config whose object is handed over may hold the other keys that it takes: ``data:
{num_workers: 2}``. Whatever goes wrong in the user's module becomes one problem that names the key,
the reason and the line of code.
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
from pathlib import Path
from typing import Any, Final

import torch

from framework.config.base import Factory, Object, plain_values
from framework.config.data import DataObject
from framework.config.explain import homes_of
from framework.config.load import config_from_values
from framework.config.optimizer import OptimizerObject
from framework.config.run_config import RunConfig
from framework.data.splits import Splits, given_splits
from framework.engine.checkpoint_bytes import is_plain
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError, FrameworkError, Problem
from framework.models.layers import Layer
from framework.text.typos import nearest

LayerList = Sequence[torch.nn.Module] | Sequence[Layer]
ModelSource = torch.nn.Module | LayerList | Callable[[], torch.nn.Module | LayerList]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

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
        callbacks: objects that are called at the events of the run, after those of the config.
        scheduler: a callable that takes the optimizer and returns a schedule with the interface of
            torch's LRScheduler.
    """

    model: ModelSource | None = None
    train_data: Any = None
    eval_data: Any = None
    task: Any = None
    optimizer: MakeOptimizer | None = None
    callbacks: Sequence[Any] = ()
    scheduler: MakeSchedule | None = None

    @cached_property
    def splits(self) -> Splits | None:
        """The datasets that were handed over; looked at once, however often they are asked for.

        Raises:
            ConfigError: they are no datasets, or there are none for training.
        """
        if self.eval_data is not None and self.train_data is None:
            reason = "it was handed over without train_data"
            fix = "hand over train_data as well"
            raise ConfigError.of("train-data-not-given", reason, fix, "eval_data")
        if self.train_data is None:
            return None
        return given_splits(self.train_data, self.eval_data)


def config_with_objects(values: RunConfig | Mapping[str, Any], objects: Objects) -> RunConfig:
    """Validate a config from Python, and let the sections of handed-over objects say so.

    Raises:
        ConfigError: with every problem found.
        UsageError: it is no config at all.
    """
    # The default model reads images of the default data: data of one's own is hardly ever meant for
    # it.
    if objects.train_data is not None and objects.model is None and not _names_model(values):
        fix = "hand over model=..., or name one in the config's model section"
        raise ConfigError.of(
            "model-not-given", "train_data was handed over, and no model", fix, "model"
        )
    if isinstance(values, Mapping):
        values = _with_sections(plain_values(values), objects)
    config = config_from_values(values)
    key = "run.world_size"
    asked = config.run.world_size or 1
    if asked == 1:
        key = "parallel"
        asked = math.prod(config.parallel.sizes().values()) * config.parallel.expert
    if asked > int(os.environ.get("WORLD_SIZE", "1")) and hasattr(builtins, "__IPYTHON__"):
        reason = "a notebook is one process with one device"
        fix = f"start a script: deepspeed --num_gpus {asked} train.py"
        raise ConfigError.of("devices-of-notebook", reason, fix, key, asked)
    return describe_objects(config, objects)


def _names_model(values: RunConfig | Mapping[str, Any]) -> bool:
    return "model" in (values.model_fields_set if isinstance(values, RunConfig) else values)


def describe_objects(config: RunConfig, objects: Objects) -> RunConfig:
    """The config with the sections of handed-over objects saying so."""
    found = _sections(objects)
    changes: dict[str, Any] = {
        name: Object(**found[name]) for name in ("model", "task", "scheduler") if name in found
    }
    splits = objects.splits
    if splits is not None:
        known = config.data.model_dump(include={*DataObject.model_fields} - {"object"})
        taken = dict(splits.taken)
        size = taken.pop("micro_size", None)
        eval_size = taken.pop("eval_size", None)
        if "num_workers" in config.data.model_fields_set:
            taken.pop("num_workers", None)
        changes["data"] = DataObject(**known | taken | found["data"])
        batch = config.batch
        measured = config.evaluation
        is_open = batch.micro_size is None and "batch.micro_size" not in config.auto
        if is_open and None in (batch.global_size, batch.accumulation_steps):
            changes["batch"] = batch.model_copy(update={"micro_size": size})
        changes["evaluation"] = measured.model_copy(
            update={"batch_size": measured.batch_size or eval_size}
        )
    if "optimizer" in found:
        if isinstance(config.optimizer, OptimizerObject):
            stated = config.optimizer.lr
        else:
            stated = None
        changes["optimizer"] = OptimizerObject(**{"lr": stated, **found["optimizer"]})
    return config.model_copy(update=changes)


def type_name(value: Any) -> str:
    """Of a class or function its own name, of anything else that of its type, as
    ``module.name``.
    """
    if inspect.isroutine(value) or inspect.isclass(value):
        kind = value
    else:
        kind = type(value)
    return f"{kind.__module__ or 'builtins'}.{kind.__qualname__}"


def _with_sections(values: dict[str, Any], objects: Objects) -> dict[str, Any]:
    """The values with what the objects say; in a section that names something else the object takes
    its place later.
    """
    for name, found in _sections(objects).items():
        section = values.get(name, {})
        if not isinstance(section, Mapping) or any(tag in section for tag in _TAGS):
            continue
        stated = section.get("lr")
        rate = found.get("lr")
        if name == "optimizer" and None not in (stated, rate) and stated != rate:
            reason = f"the optimizer that was handed over has lr={rate:g}"
            raise ConfigError.of("object-lr-differs", reason, "give one", "optimizer.lr", stated)
        values[name] = {**section, **found}
    return values


def _sections(objects: Objects) -> dict[str, dict[str, Any]]:
    """List the config section that describes each object."""
    found: dict[str, dict[str, Any]] = {}
    if objects.model is not None:
        found["model"] = {"object": type_name(objects.model)}
    splits = objects.splits
    if splits is not None:
        found["data"] = {"object": type_name(splits.train)}
        if splits.num_train is not None:
            found["data"]["train_samples"] = splits.num_train
    if objects.task is not None:
        found["task"] = {"object": type_name(objects.task)}
    if objects.scheduler is not None:
        found["scheduler"] = {
            "object": type_name(getattr(objects.scheduler, "func", objects.scheduler))
        }
    if objects.optimizer is not None:
        # Of a `functools.partial` as much as JSON has: a run that goes on must have the same.
        if isinstance(objects.optimizer, partial):
            keywords = objects.optimizer.keywords
        else:
            keywords = {}
        args = {
            name: plain_values(value)
            for name, value in keywords.items()
            if name != "lr" and is_plain(value)
        }
        found["optimizer"] = {"object": type_name(objects.optimizer), "args": args}
        # one that is no plain number (a tensor) is the optimizer's business
        lr = keywords.get("lr")
        if (
            isinstance(lr, (int, float))
            and not isinstance(lr, bool)
            and math.isfinite(lr)
            and lr >= 0
        ):
            found["optimizer"]["lr"] = float(lr)
    return found


# Arguments of `fit` that there are not: where what they mean is written instead.
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
_MEANT: Final[Mapping[str, str]] = json.loads(
    Path(__file__).with_name("arguments.json").read_text(encoding="utf-8")
)


def refuse_unknown_arguments(names: Iterable[str], *, further: Sequence[Any] = ()) -> None:
    """Refuse arguments that `fit` does not take, and those after the config that do not say what
    they are.

    Raises:
        ConfigError: kind ``unknown-argument``, for each.
    """
    if further:
        given = ", ".join(type(one).__name__ for one in further)
        reason = "only the config is taken by its place, as the first argument"
        fix = f"write fit(config, {'=..., '.join(_KNOWN[1:])}=...)"
        raise ConfigError.of("unknown-argument", reason, fix, "fit", given)
    problems = [
        Problem("unknown-argument", "fit() takes no such argument", _fix(name), name)
        for name in names
    ]
    if problems:
        raise ConfigError(problems)


def _fix(name: str) -> str:
    if name in _MEANT:
        return _MEANT[name]
    if name in RunConfig.model_fields:
        return f"set the section {name} in the config"
    homes = list(homes_of(name, RunConfig))
    if homes:
        return f"set {' or '.join(homes[:3])} in the config"
    meant = nearest(name, _KNOWN)
    if meant:
        return f"did you mean '{meant}'?"
    return f"known: {', '.join(_KNOWN)}; everything else is set in the config"


def load_target(path: str, *, key: str) -> Any:
    """Import ``package.module:name``; the current folder is searched as well.

    Raises:
        ConfigError: the module is not there or fails while it is imported, or has no such name.
    """

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError.of(kind, reason, fix, key, path)

    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # a script without `if __name__ == "__main__"` exits, perhaps with code 0
        if isinstance(error, ModuleNotFoundError):
            missing = error.name
        else:
            missing = None
        if not missing:
            raise refuse(
                "target-import-failed", f"importing it failed: {summary(error)}", "mend the module"
            ) from error
        if module_name == missing or module_name.startswith(f"{missing}."):
            fix = f"check the spelling, or start where {module_name.split('.')[0]} can be imported"
            raise refuse("target-not-found", f"there is no module {missing}", fix) from error
        fix = f"install {missing}, or check its spelling"
        raise refuse(
            "target-import-failed", f"importing it needs {missing}{_place(error)}", fix
        ) from error
    walked = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            guess = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            if guess:
                fix = f"did you mean '{guess}'?"
            else:
                fix = "check the spelling"
            raise refuse("target-not-found", f"{walked} has no {part}", fix) from error
        except Exception as error:  # modules that import on first use
            reason = f"reading {part} failed: {summary(error)}"
            raise refuse("target-import-failed", reason, "mend the module") from error
        walked = f"{walked}.{part}"
    return found


def call_factory(factory: Factory, *, key: str) -> Any:
    """Import and call.

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
    """The problem of a target that was called and raised."""
    reason = f"calling it failed: {summary(error)}"
    fix = f"check {key}.args and the code"
    return ConfigError.of("target-failed", reason, fix, f"{key}.target", path)


def takes(function: Any, kwargs: Mapping[str, Any], *, positional: int = 0) -> bool:
    """Check whether it can be called so, as `check_arguments` does; True where nobody can tell."""
    try:
        check_arguments(function, kwargs, key="", positional=positional)
    except ConfigError:
        return False
    return True


def check_arguments(
    function: Any, kwargs: Mapping[str, Any], *, key: str, positional: int = 0
) -> None:
    """Refuse something that cannot be called with these keyword arguments (after `positional`
    others).
    """
    if not callable(function):
        value = f"a {type(function).__name__}"
        fix = "name a class or a function"
        raise ConfigError.of(
            "target-not-callable", "it cannot be called", fix, f"{key}.target", value
        )
    try:
        # A decorator may supply arguments that the function beneath it asks for: what is called
        # counts.
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return
    try:
        signature.bind(*[None] * positional, **kwargs)
    except TypeError as error:
        raise ConfigError.of(
            "target-args", str(error), f"it takes {signature}", f"{key}.args", dict(kwargs)
        ) from error


def check_handed_over(function: Any, *, key: str, call: str, fix: str, num_values: int = 0) -> None:
    """Refuse an object from Python that cannot be called with so many values and nothing else.

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
    """An exception in one line, with the innermost place in the code."""
    if isinstance(error, SyntaxError) and error.filename:
        stated = error.msg
    else:
        stated = str(error)
    text = " ".join(stated.split())[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''}{_place(error)}"


def _place(error: BaseException) -> str:
    """Format the place where an error was raised, as `` (file:line)``; frames of the import
    machinery are left out.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
    ]
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    if own:
        return f" ({own[-1].filename}:{own[-1].lineno})"
    return ""
