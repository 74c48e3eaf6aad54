"""A model as a list of layers: the same blocks, run one after the other on one device or cut into
pipeline stages.

A `Layer` is a recipe, so that a pipeline stage builds its own layers only. `LayeredModel` is the
plain form of such a list; `as_layers` finds the list in an `nn.Sequential`, in a list of modules
and in any module that tells its layers.

The weights of a recipe are drawn under a seed of their own (the model's seed and the layer's
number), never from a stream that runs through the layers before it: where the model is cut does not
change what it starts from.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from framework.errors import ConfigError, in_one_line


class LayerStack(nn.Sequential):
    """`nn.Sequential` whose subclasses may have a constructor of their own: a slice such as
    ``model[:-1]`` is a plain `nn.Sequential` that shares the layers.
    """

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return nn.Sequential(OrderedDict(list(self._modules.items())[index]))


# Activation recomputation: a group of layers keeps only its input, and runs again in the backward
# pass.


def recompute(
    run: Callable[..., Any], *values: Any, modules: Callable[[], Iterable[nn.Module]]
) -> Any:
    """``run(*values)``, keeping the values and none of what `run` computes for the backward pass on
    the way.

    Gradients are the same to the bit: dropout repeats its draws, and batch norms count the batch
    once.

    `modules` tells the modules that `run` calls, submodules included; it is asked in the backward
    pass.
    """
    return checkpoint(
        run,
        *values,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _statistics_kept(modules)),
    )


@contextmanager
def _statistics_kept(modules: Callable[[], Iterable[nn.Module]]) -> Iterator[None]:
    """The first run has counted the batch. `track_running_stats` cannot be turned off instead:
    autograd would save other tensors than the first time, and the checkpoint would complain.
    """
    norms = [module for module in modules() if isinstance(module, _BatchNorm) and module.training]
    before = [(norm, norm.momentum, copy.deepcopy(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, tracked in before:
            norm.momentum = momentum
            if tracked is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(tracked)


_SEED_STRIDE: Final = 0x9E3779B97F4A7C15
_building: ContextVar[bool] = ContextVar("building", default=True)


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: name of the submodule in the plain model (dots reach into submodules), and so of its
            weights.
        build: makes the module; called once per process that runs the layer.
        call: how the module is applied to the value of the layer before, when that is not
            ``module(value)``. It must go through ``module(...)``, or ZeRO-3 does not see that the
            weights are needed.
        tied: layers with the same key are one module, and share `tied_weights` across stages. The
            first of them must have no `call` and no further weights.
        tied_weights: the attributes that are shared.
        is_built: `build` returns a module that exists already, with its weights.
        may_start_stage: whether a pipeline may be cut before it. Not where it gets several floating
            tensors.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[nn.Module, Any], Any] | None = None
    tied: str = ""
    tied_weights: tuple[str, ...] = ("weight",)
    is_built: bool = False
    may_start_stage: bool = True

    def make(self, number: int, *, seed: int) -> nn.Module:
        """Build the module with weights that depend on `seed` and the layer's number only."""
        if self.is_built:
            return self.build()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((seed * _SEED_STRIDE + number + 1) % 2**63)
            return self.build()

    def make_copy(self, number: int, *, seed: int) -> nn.Module:
        """`make`, but never the module that will train: running it may change its buffers (batch
        norm).
        """
        module = self.make(number, seed=seed)
        if self.is_built:
            return copy.deepcopy(module)
        return module

    def apply(self, module: nn.Module, value: Any) -> Any:
        """The layer's output for the output of the layer before."""
        if self.call is None:
            return module(value)
        return self.call(module, value)


@contextmanager
def recipes_only() -> Iterator[None]:
    """Within this block a `LayeredModel` keeps its recipes and builds nothing."""
    token = _building.set(False)
    try:
        yield
    finally:
        _building.reset(token)


class LayeredModel(nn.Module):
    """Layers applied one after the other; its weights bear the names of the layers.

    Input: one value, or several, which the first layer gets as one tuple. Output: what the last
    layer returns. Between layers goes a tensor or a tuple of tensors.
    """

    def __init__(self, layers: Sequence[Layer], *, taken_from: Any = None) -> None:
        """Build the layers, under the seed that `torch.manual_seed` set last.

        Args:
            layers: in the order in which they are run.
            taken_from: the model that they are the layers of; its own `train()`, if it has one,
                sets modes as well.

        Raises:
            ValueError: two layers have one name, or tied layers do not fit together.
        """
        super().__init__()
        refuse_bad_ties(layers)
        self.recipes = tuple(layers)
        self.recompute_every = 0
        self.taken_from_train = own_train(taken_from)
        if not _building.get():
            return
        seed = torch.initial_seed()
        for number, layer in enumerate(self.recipes):
            if self.place_of(layer) == layer.name:
                _register(self, layer.name, layer.make(number, seed=seed))

    def train(self, mode: bool = True) -> LayeredModel:
        """Set the mode of all layers."""
        super().train(mode)
        if self.taken_from_train is not None:
            self.taken_from_train(mode)
        return self

    def layers(self) -> list[Layer]:
        """The layers with the weights they have now; the bare recipes where nothing was built."""
        if not any(True for _ in self.children()):
            return list(self.recipes)
        return [
            replace(layer, build=_get(self.get_submodule(self.place_of(layer))), is_built=True)
            for layer in self.recipes
        ]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run all layers; in groups of `recompute_every`, if it is set, which keep only their
        inputs for backward. Named inputs are taken in their order.
        """
        inputs += tuple(named.values())
        if len(inputs) == 1:
            value = inputs[0]
        else:
            value = inputs
        every = self.recompute_every
        if not every or not torch.is_grad_enabled():
            return self._run(value, 0, len(self.recipes))
        for start in range(0, len(self.recipes), every):
            value = recompute(self._run, value, start, start + every, modules=self.modules)
        return value

    def _run(self, value: Any, start: int, stop: int) -> Any:
        for layer in self.recipes[start:stop]:
            value = layer.apply(self.get_submodule(self.place_of(layer)), value)
        return value

    def place_of(self, layer: Layer) -> str:
        """Return the name under which the layer's module is registered: that of the first that is
        tied to it.
        """
        if layer.tied:
            return next(first.name for first in self.recipes if first.tied == layer.tied)
        return layer.name


def as_layers(model: Any) -> list[Layer]:
    """The layers of a model, in order.

    Args:
        model: a `LayeredModel`; a module whose method ``layers()`` returns (name, module) pairs; an
            `nn.Sequential`, nested ones included; a list or tuple of modules. One module in two
            places is two layers.

    Raises:
        ConfigError: kind ``model-not-layered`` or ``model-layers-incomplete``.
    """
    if isinstance(model, LayeredModel):
        return model.layers()
    if lists_layers(model):
        return _reported(model)
    if isinstance(model, (nn.Sequential, nn.ModuleList, list, tuple)) and not _has_own_forward(
        model
    ):
        pairs = list(
            _children(model)
            if isinstance(model, nn.Module)
            else ((str(n), m) for n, m in enumerate(model))
        )
        if pairs and all(isinstance(module, nn.Module) for _, module in pairs):
            return [layer for name, module in pairs for layer in _flat(name, module)]
    reason, fix = _why_not_layered(model)
    raise ConfigError.of("model-not-layered", reason, fix, "model", type(model).__name__)


def own_train(model: Any) -> Callable[[bool], object] | None:
    """Return the `train()` of a model whose class overrides it, to keep parts in evaluation mode;
    None for others.
    """
    if not isinstance(model, nn.Module) or type(model).train in (
        nn.Module.train,
        LayeredModel.train,
    ):
        return None
    return model.train


def lists_layers(model: Any) -> bool:
    """Check whether a module has a method `layers()` beside a forward() of its own; a submodule of
    that name, which is common, is a part of it and no method.
    """
    reported = getattr(model, "layers", None)
    is_own = isinstance(model, nn.Module) and not isinstance(model, LayeredModel)
    return is_own and callable(reported) and not isinstance(reported, nn.Module)


def _has_own_forward(model: Any) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward


def _why_not_layered(model: Any) -> tuple[str, str]:
    advice = (
        "give it a method layers() that returns its (name, module) pairs in the order in "
        "which forward() calls them"
    )
    if isinstance(model, nn.Module) and isinstance(getattr(model, "layers", None), nn.Module):
        kind = type(model.layers).__name__
        reason = (
            f"its attribute layers is a {kind}, and nobody but its forward() knows how that is run"
        )
        return reason, f"name the {kind} otherwise (self.blocks), and {advice}"
    if _has_own_forward(model):
        return (
            "it has a forward() of its own, which may do more than call its modules in turn",
            advice,
        )
    if not isinstance(model, (nn.Sequential, nn.ModuleList, list, tuple)):
        reason = (
            "it is not a sequence of layers, so nobody but its forward() knows where it can be cut"
        )
        return reason, f"make it an nn.Sequential, return a list of layers, or {advice}"
    items = list(model)
    if not items:
        return "it is a sequence of no layers", "put at least one into it"
    if any(isinstance(item, Layer) for item in items):
        number = next(n for n, item in enumerate(items) if not isinstance(item, Layer))
        reason = f"item {number} of the list is no Layer, and others are"
        return reason, "write a Layer for every item, or a module for every item"
    number, other = next(
        (n, item) for n, item in enumerate(items) if not isinstance(item, nn.Module)
    )
    reason = (
        f"item {number} of the list ({getattr(other, '__name__', type(other).__name__)}) is "
        "not a module"
    )
    return (
        reason,
        "put a module in its place, such as nn.ReLU() for torch.relu and nn.Flatten() for "
        "torch.flatten",
    )


def _reported(model: nn.Module) -> list[Layer]:
    """Return the layers that a module's own `layers()` lists, if it leaves no weight out."""
    refusal = partial(ConfigError.of, key="model", value=type(model).__name__)
    wrong = "does not return (name, module) pairs"
    pairs: list[tuple[str, Any]] = []
    try:
        pairs = [(str(name), module) for name, module in model.layers()]  # type: ignore[operator]
    except (TypeError, ValueError):
        pass
    except Exception as error:
        wrong = f"fails: {in_one_line(error)}"
    if not pairs or not all(isinstance(module, nn.Module) for _, module in pairs):
        raise refusal(
            "model-not-layered", f"its layers() {wrong}", 'return [("stem", self.stem), ...]'
        )
    reported = {
        id(tensor) for _, module in pairs for tensor in (*module.parameters(), *module.buffers())
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in reported:
            reason = f"its layers() leaves out {name}"
            fix = "name the module that holds it"
            raise refusal("model-layers-incomplete", reason, fix)
    return [_built(name, module) for name, module in pairs]


def _flat(name: str, module: nn.Module) -> Iterator[Layer]:
    """The layers of nested plain sequences; a subclass of nn.Sequential may do more in its forward,
    and stays whole.
    """
    if type(module) is nn.Sequential and len(module):
        for child_name, child in _children(module):
            yield from _flat(f"{name}.{child_name}", child)
    else:
        yield _built(name, module)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """In the order in which forward() calls them; `named_children` leaves out a module that it has
    met before.
    """
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _built(name: str, module: nn.Module) -> Layer:
    return Layer(name, _get(module), is_built=True)


def _get(module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: module


def refuse_bad_ties(layers: Sequence[Layer]) -> None:
    """Check names and ties.

    Raises:
        ValueError: with the name of the layer.
    """
    seen: set[str] = set()
    first_of: dict[str, Layer] = {}
    for layer in layers:
        if layer.name in seen:
            raise ValueError(f"two layers are named {layer.name}")
        seen.add(layer.name)
        if not layer.tied:
            continue
        first = first_of.setdefault(layer.tied, layer)
        if first is layer and layer.call is not None:
            raise ValueError(
                f"layer {layer.name}: the first of the layers tied as {layer.tied} must have no "
                "call"
            )
        if first.tied_weights != layer.tied_weights:
            raise ValueError(
                f"layers {first.name} and {layer.name} are tied by different weights: "
                f"{first.tied_weights} and {layer.tied_weights}"
            )


def _register(parent: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(last, module)
