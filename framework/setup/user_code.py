"""The user's own code: objects that a program hands over, and targets that a config names as
``package.module:name`` with keyword arguments.

An error in the user's module becomes one problem that names the key, the reason and the line of
code.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol

import torch

from framework.config.base import Factory
from framework.config.run_config import RunConfig
from framework.data.splits import Splits, given_splits
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError, FrameworkError
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


def type_name(value: Any) -> str:
    """Return ``module.name`` of a class or function, or of the type of any other value."""
    if inspect.isroutine(value) or inspect.isclass(value):
        kind = value
    else:
        kind = type(value)
    return f"{kind.__module__ or 'builtins'}.{kind.__qualname__}"


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
        from framework.setup.user_code_errors import import_failed

        raise import_failed(error, module_name, path, key=key) from error
    walked = module_name
    for name in dotted_name.split("."):
        value = _attribute(value, name, walked, path, key=key)
        walked = f"{walked}.{name}"
    return value


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
        from framework.setup.user_code_errors import summary

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
        from framework.setup.user_code_errors import call_failed

        raise call_failed(error, factory.path, key=key) from error


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
