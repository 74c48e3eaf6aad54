"""Items of a list of layers that are no modules: DeepSpeed's `LayerSpec` and `TiedLayerSpec`, a
`PipelineModule` with such a list, and functions without weights.

DeepSpeed is not imported: an object can be one of its classes only if the user's own code has
imported them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.system.log import warn

_MODULE: Final = "deepspeed.runtime.pipe.module"
# Arguments of a PipelineModule that a run config decides, with the key that does.
_DECIDED: Final[Mapping[str, str]] = {
    "num_stages": "parallel.pipe",
    "partition_method": "parallel.partition",
    "activation_checkpoint_interval": "training.recompute_every",
}


def _class_of_pipe(name: str) -> Any:
    """Return a class of DeepSpeed's pipelines, or None if nothing has imported it."""
    return getattr(sys.modules.get(_MODULE), name, None)


def _is_a(item: Any, name: str) -> bool:
    kind = _class_of_pipe(name)
    return kind is not None and isinstance(item, kind)


def is_spec(item: Any) -> bool:
    """Check whether an item is DeepSpeed's `LayerSpec`, or a `TiedLayerSpec`."""
    return _is_a(item, "LayerSpec")


def is_tied(spec: Any) -> bool:
    """Check whether an item is DeepSpeed's `TiedLayerSpec`."""
    return _is_a(spec, "TiedLayerSpec")


def is_pipeline(model: Any) -> bool:
    """Check whether a model is DeepSpeed's `PipelineModule`."""
    return _is_a(model, "PipelineModule")


@contextmanager
def pipelines_unbuilt() -> Iterator[None]:
    """Let a `PipelineModule` that is made within the block keep its arguments and build nothing.

    DeepSpeed's constructor builds the layers of this rank's stage, and needs a process group.
    """
    pipeline = _class_of_pipe("PipelineModule")
    if pipeline is None:
        yield
        return
    construct = pipeline.__init__

    @functools.wraps(construct)
    def keep_arguments(self: Any, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(construct).bind(self, *args, **kwargs)
        call.apply_defaults()
        nn.Module.__init__(self)
        self.kept_arguments = dict(call.arguments)
        self.loss_fn = self.kept_arguments["loss_fn"]

    pipeline.__init__ = keep_arguments
    try:
        yield
    finally:
        pipeline.__init__ = construct


def arguments_of(pipeline: Any) -> Mapping[str, Any] | None:
    """Return the arguments of a `PipelineModule` that was made within `pipelines_unbuilt`, its
    number of stages among them; None for one that is built.
    """
    arguments: dict[str, Any] | None = getattr(pipeline, "kept_arguments", None)
    if arguments is None:
        return None
    topology = arguments.get("topology")
    if topology is not None:
        return {**arguments, "num_stages": topology.get_dim("pipe")}
    return arguments


def check_arguments_of(pipeline: Any, config: RunConfig) -> None:
    """Refuse a `PipelineModule` with a loss where the run names none, and warn of its arguments
    that the run config decides.

    Raises:
        ConfigError: kind ``pipeline-loss``.
    """
    arguments = arguments_of(pipeline)
    if arguments is None:
        return
    loss = arguments["loss_fn"]
    if loss is not None and "task" not in config.model_fields_set:
        reason = (
            f"its PipelineModule has the loss_fn {name_of(loss)}, and the loss of a run is its "
            "task, which is not given"
        )
        fix = "name the loss: task: {target: my_module:my_loss}, or fit(..., task=my_loss)"
        raise ConfigError.of("pipeline-loss", reason, fix, "task")
    others = []
    for name, key in _DECIDED.items():
        ours = attrgetter(key)(config)
        if (arguments[name] or 0) != ours:
            others.append(f"{name}={arguments[name]} ({key} is {ours})")
    if others:
        warn(
            f"model: of its PipelineModule the layers are taken, and not {', '.join(others)} "
            "[pipeline-settings-left-out]",
            is_of_all_ranks=True,
        )


def builders_of(pipeline: Any) -> list[Any]:
    """Return the items of an unbuilt `PipelineModule`; with `seed_layers` a spec is built under the
    seed that DeepSpeed gives it, so that it has the same first weights.
    """
    arguments = arguments_of(pipeline)
    assert arguments is not None
    items = list(arguments["layers"])
    if not arguments["seed_layers"]:
        return items
    seed_by = arguments["seed_fn"] or _seed_all
    for number, item in enumerate(items):
        if is_spec(item):
            seed = arguments["base_seed"] + number
            # A copy: one spec may stand for several layers, and be built again.
            items[number] = seeded = copy.copy(item)
            seeded.build = partial(_built_under, item.build, seed_by, seed)
    return items


def _seed_all(seed: int) -> None:
    """Seed as DeepSpeed does (runtime/utils.py, `set_random_seed`)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _built_under(build: Callable[[], nn.Module], seed_by: Callable[[int], Any], seed: int) -> Any:
    """Build a module under a seed, and leave the generators of Python and numpy as they were."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        seed_by(seed)
        return build()
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class Function(nn.Module):
    """A function without weights, as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        """Return the function of the value of the layer before."""
        return self.function(value)

    def extra_repr(self) -> str:
        """Name the function."""
        return name_of(self.function)


def name_of(item: Any) -> str:
    """Return the name of an item for a message."""
    return str(getattr(item, "__name__", type(item).__name__))


def why_no_function(item: Any) -> tuple[str, str] | None:
    """Return the reason why an item cannot be applied as a function, and the fix; None if it can
    be.
    """
    name = name_of(item)
    if not callable(item):
        return "is neither a module nor a function", "put a module or a function in its place"
    if inspect.isclass(item):
        return "is a class", f"write {name}()"
    if isinstance(item, partial) and inspect.isclass(item.func):
        made = name_of(item.func)
        return (
            f"makes a {made} instead of applying one",
            f"write {made}(...), or a recipe: Layer(name, partial({made}, ...)), or DeepSpeed's "
            f"LayerSpec({made}, ...)",
        )
    for found in _modules_in(item):
        return (
            f"uses the weights of a {type(found).__name__}, which no optimizer would find",
            f"put the {type(found).__name__} itself into the list, or a module that holds it",
        )
    return None


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """Yield modules with weights that a function refers to: as its own object, in its arguments,
    in its closure, and by names of its file.
    """
    for value in _values_in(function):
        if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
            yield value


def _values_in(function: Any) -> Iterator[Any]:
    if isinstance(function, partial):
        yield from function.args
        yield from function.keywords.values()
        yield from _values_in(function.func)
        return
    yield getattr(function, "__self__", None)
    if not inspect.isfunction(function):
        yield from getattr(function, "__dict__", {}).values()
        return
    yield from function.__defaults__ or ()
    with suppress(ValueError):  # a name of the closure has no value yet
        names = inspect.getclosurevars(function)
        yield from names.nonlocals.values()
        yield from names.globals.values()
