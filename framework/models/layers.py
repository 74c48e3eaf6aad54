"""A model as a list of layers: the same blocks, run one after the other on one device or cut into
pipeline stages.

A `Layer` is a recipe, so that a pipeline stage builds its own layers only. `LayeredModel` is the
plain form of such a list; `models.layer_lists` finds the list in other models.

The weights of a recipe are drawn under a seed of their own (from the model's seed and the layer's
number), never from a stream that runs through the layers before it: initial weights do not depend
on where the model is cut.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


class LayerStack(nn.Sequential):
    """`nn.Sequential` for subclasses with another constructor.

    A slice such as ``model[:-1]`` is a plain `nn.Sequential` that shares the layers; torch would
    call the subclass with them.
    """

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return nn.Sequential(OrderedDict(list(self._modules.items())[index]))


# Activation recomputation: a group of layers keeps only its input, and runs again in the backward
# pass.

# Kept outputs of products stay where they are, even if hooks take other saved tensors elsewhere.
# torch 2.15 asks for this choice, and earlier ones have no other.
CHECKPOINT_OPTIONS: Final[dict[str, Any]] = {
    name: False
    for name in ("respect_saved_tensors_hooks",)
    if name in inspect.signature(checkpoint).parameters
}


def recompute(
    run: Callable[..., Any],
    *values: Any,
    modules: Callable[[], Iterable[nn.Module]],
    keeps_products: bool = False,
) -> Any:
    """Return ``run(*values)``, keeping for the backward pass only `values`; `run` runs again then.

    Gradients are the same to the bit: dropout repeats its draws, and batch norms count the batch
    once.

    Args:
        run: what is called.
        values: its arguments.
        modules: returns the modules that `run` calls, submodules included. It is called in the
            backward pass.
        keeps_products: whether outputs of products are kept as well, and not computed again
            (`kept_products`).
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the first run and of the second."""
        if not keeps_products:
            return nullcontext(), _running_statistics_kept(modules)
        from framework.models.kept_products import keeping_products

        first, second = keeping_products(keeps_nothing)
        return first, _within(_running_statistics_kept(modules), second)

    return checkpoint(run, *values, use_reentrant=False, context_fn=contexts, **CHECKPOINT_OPTIONS)


_keeps_nothing = False


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Let recomputed layers keep no output within the block: products of tiles are freed one by
    one.
    """
    global _keeps_nothing
    before = _keeps_nothing
    _keeps_nothing = True
    try:
        yield
    finally:
        _keeps_nothing = before


def keeps_nothing() -> bool:
    """Check whether a block of `keeping_nothing` runs."""
    return _keeps_nothing


@contextmanager
def _within(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter several contexts in turn, for the time of the block."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _running_statistics_kept(modules: Callable[[], Iterable[nn.Module]]) -> Iterator[None]:
    """Keep the running statistics of batch norms as they are: the first run has counted the batch.

    `track_running_stats` cannot be turned off instead: autograd would save other tensors than the
    first time, and torch's checkpoint would raise an error.
    """
    norms = [module for module in modules() if isinstance(module, _BatchNorm) and module.training]
    momenta = [norm.momentum for norm in norms]
    counts = [copy.deepcopy(norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


_SEED_STRIDE: Final = 0x9E3779B97F4A7C15


_building: ContextVar[bool] = ContextVar("building", default=True)


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: name of the submodule in the plain model (dots reach into submodules), and so the
            prefix of its weights' names.
        build: makes the module; called once per process that runs the layer.
        call: how the module is applied to the value of the layer before, when that is not
            ``module(value)``. It must go through ``module(...)``, or ZeRO-3 does not see that the
            weights are needed.
        tied: layers with the same key are one module, and share `tied_weights` across stages. The
            first of them must have no further weights.
        tied_weights: the attributes that are shared.
        is_built: `build` returns a module that exists already, with its weights.
        may_start_stage: whether a pipeline may be cut before it. It may not where the layer gets
            several floating tensors.
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
        devices: list[int] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices.append(torch.cuda.current_device())
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((seed * _SEED_STRIDE + number + 1) % 2**63)
            return self.build()

    def make_copy(self, number: int, *, seed: int) -> nn.Module:
        """Make a module for a trial run, which may change its buffers (batch norm): never the one
        that will be trained.
        """
        module = self.make(number, seed=seed)
        if self.is_built:
            return copy.deepcopy(module)
        return module

    def apply(self, module: nn.Module, value: Any) -> Any:
        """Return the layer's output for the output of the layer before."""
        if self.call is None:
            return module(value)
        return self.call(module, value)


@contextmanager
def recipes_only() -> Iterator[None]:
    """Let a `LayeredModel` that is made within the block keep its recipes and build nothing."""
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
            taken_from: the model that has these layers; its own `train()`, if it has one, sets
                modes as well.

        Raises:
            ValueError: two layers have one name, or tied layers do not fit together.
        """
        super().__init__()
        refuse_bad_ties(layers)
        self.recipes = tuple(layers)
        self.recompute_every = 0
        self.keeps_products = False
        self.taken_from_train = own_train(taken_from)
        if not _building.get():
            return
        seed = torch.initial_seed()
        for number, layer in enumerate(self.recipes):
            if self.place_of(layer) == layer.name:
                register_module(self, layer.name, layer.make(number, seed=seed))

    def train(self, mode: bool = True) -> LayeredModel:
        """Set the mode of all layers."""
        super().train(mode)
        if self.taken_from_train is not None:
            self.taken_from_train(mode)
        return self

    def enter_stage(self, value: Any) -> Any:
        """Return what the first layer of a pipeline's stage gets, of what was read or received."""
        return value

    def leave_stage(self, value: Any) -> Any:
        """Return what a pipeline's stage sends, of what its last layer returns."""
        return value

    def layers(self) -> list[Layer]:
        """Return the layers with the weights they have now, or the recipes if none was built."""
        if not list(self.children()):
            return list(self.recipes)
        built: list[Layer] = []
        for layer in self.recipes:
            module = self.get_submodule(self.place_of(layer))
            built.append(replace(layer, build=getter_of(module), is_built=True))
        return built

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run all layers; named inputs are taken in their order.

        With `recompute_every`, groups of that many layers keep only their inputs for the backward
        pass, and with `keeps_products` the outputs of products.
        """
        inputs += tuple(named_inputs.values())
        value: Any = inputs
        if len(inputs) == 1:
            value = inputs[0]
        every = self.recompute_every
        if self.keeps_products and self._is_compiled():
            every = 0  # the compiler's graphs keep products, and compute cheap operations again
        if not every or not torch.is_grad_enabled():
            return self._run(value, 0, len(self.recipes))
        for start in range(0, len(self.recipes), every):
            value = recompute(
                self._run,
                value,
                start,
                start + every,
                modules=self.modules,
                keeps_products=self.keeps_products,
            )
        return value

    def _is_compiled(self) -> bool:
        """Check whether torch.compile runs the layers."""
        first = self.get_submodule(self.place_of(self.recipes[0]))
        return first._compiled_call_impl is not None

    def _run(self, value: Any, start: int, stop: int) -> Any:
        for layer in self.recipes[start:stop]:
            module = self.get_submodule(self.place_of(layer))
            is_last = layer is self.recipes[-1]  # its outputs are the model's
            with keeping_nothing() if is_last and self.keeps_products else nullcontext():
                value = layer.apply(module, value)
        return value

    def place_of(self, layer: Layer) -> str:
        """Return the name under which the layer's module is registered.

        Tied layers are one module, registered under the name of the first of them.
        """
        if layer.tied:
            return next(first.name for first in self.recipes if first.tied == layer.tied)
        return layer.name


def in_order(inputs: Any) -> Any:
    """Return named inputs of a model as its first layer gets them: one value, or several in their
    order as a tuple. Other inputs stay as they are.
    """
    if not isinstance(inputs, Mapping):
        return inputs
    values = tuple(inputs.values())
    if len(values) == 1:
        return values[0]
    return values


@dataclass(frozen=True)
class AroundLayers:
    """What a model does around its layers, where stages of a pipeline run them.

    Attributes:
        set_mode: the model's own `train()`, which sets modes of its layers; None where its class
            overrides none.
        enter: turns what a stage has read or received into what its first layer gets.
        leave: turns what a stage's last layer returns into what can be sent.
        order: turns the task's inputs into what the first stage reads: a tensor or a tuple.
        judge: makes what the task gets as outputs of what the last layer returns and the targets;
            None where that is the same.
    """

    set_mode: Callable[[bool], object] | None = None
    enter: Callable[[Any], Any] | None = None
    leave: Callable[[Any], Any] | None = None
    order: Callable[[Any], Any] = in_order
    judge: Callable[[Any, Any], Any] | None = None


def own_train(model: Any) -> Callable[[bool], object] | None:
    """Return the `train()` of a model if its class overrides it, or None.

    Classes override it to keep parts in evaluation mode.
    """
    if not isinstance(model, nn.Module):
        return None
    if type(model).train in (nn.Module.train, LayeredModel.train):
        return None
    return model.train


def getter_of(module: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that returns a module, as what builds a layer that is built."""
    return lambda: module


def refuse_bad_ties(layers: Sequence[Layer]) -> None:
    """Check names and ties.

    Raises:
        ValueError: with the name of the layer.
    """
    names: set[str] = set()
    first_of_tie: dict[str, Layer] = {}
    for layer in layers:
        if layer.name in names:
            raise ValueError(f"two layers are named {layer.name}")
        names.add(layer.name)
        if not layer.tied:
            continue
        first = first_of_tie.setdefault(layer.tied, layer)
        if first.tied_weights != layer.tied_weights:
            raise ValueError(
                f"layers {first.name} and {layer.name} are tied by different weights: "
                f"{first.tied_weights} and {layer.tied_weights}"
            )


def first_of_ties(layers: Sequence[Layer]) -> dict[str, str]:
    """Map the key of each tie to the name of the first layer that has it."""
    return {layer.tied: layer.name for layer in reversed(layers) if layer.tied}


def register_module(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under a dotted name, with empty modules for the parts that are not there yet."""
    *path, last = name.split(".")
    for part in path:
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(last, module)
