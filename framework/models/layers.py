"""A model as a list of layers: the same blocks, run one after the other on one device or cut into
pipeline stages.

A `Layer` is a recipe, so that a pipeline stage builds its own layers only. `LayeredModel` is the
plain form of such a list; `as_layers` finds the list in an `nn.Sequential`, in a list of modules,
functions and DeepSpeed's `LayerSpec`s, in a `PipelineModule` and in any module with a method
`layers()`.

The weights of a recipe are drawn under a seed of their own (from the model's seed and the layer's
number), never from a stream that runs through the layers before it: initial weights do not depend
on where the model is cut.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from framework.errors import ConfigError, in_one_line


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


_SEQUENCES: Final = (nn.Sequential, nn.ModuleList, list, tuple)
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
            built.append(replace(layer, build=_getter(module), is_built=True))
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


def as_layers(model: Any) -> list[Layer]:
    """List the layers of a model, in order.

    Args:
        model: a `LayeredModel`; a module with a method ``layers()`` that returns (name, module)
            pairs; an `nn.Sequential`, nested ones included; a list or tuple of modules, functions
            without weights, `Layer`s and DeepSpeed's `LayerSpec`s and `TiedLayerSpec`s; a
            `PipelineModule` that was made within `pipelines_unbuilt`. One module in two places is
            two layers.

    Raises:
        ConfigError: kind ``model-not-layered`` or ``model-layers-incomplete``.
    """
    if isinstance(model, LayeredModel):
        return model.layers()
    if lists_layers(model):
        return _layers_by_method(model)
    if isinstance(model, _SEQUENCES) and not _has_own_forward(model) and len(model):
        return _layers_of_items(model)
    from framework.models.layer_specs import arguments_of, builders_of, is_pipeline

    if is_pipeline(model) and arguments_of(model) is not None:
        return _layers_of_items(builders_of(model))
    reason, fix = _why_not_layered(model)
    raise ConfigError.of("model-not-layered", reason, fix, "model", type(model).__name__)


def own_train(model: Any) -> Callable[[bool], object] | None:
    """Return the `train()` of a model if its class overrides it, or None.

    Classes override it to keep parts in evaluation mode.
    """
    if not isinstance(model, nn.Module):
        return None
    if type(model).train in (nn.Module.train, LayeredModel.train):
        return None
    return model.train


def lists_layers(model: Any) -> bool:
    """Check whether a module has a method `layers()` beside its own `forward()`.

    A submodule named ``layers``, which is common, is no such method.
    """
    if not isinstance(model, nn.Module) or isinstance(model, LayeredModel):
        return False
    attribute = getattr(model, "layers", None)
    return callable(attribute) and not isinstance(attribute, nn.Module)


def _has_own_forward(model: Any) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward


def _why_not_layered(model: Any) -> tuple[str, str]:
    """Return the reason why a model is no list of layers, and the fix."""
    advice = (
        "give it a method layers() that returns its (name, module) pairs in the order in "
        "which forward() calls them"
    )
    if isinstance(model, nn.Module) and isinstance(getattr(model, "layers", None), nn.Module):
        kind = type(model.layers).__name__
        reason = f"its attribute layers is a {kind}, and only its forward() knows how that is run"
        return reason, f"name the {kind} otherwise (self.blocks), and {advice}"
    if _has_own_forward(model):
        return (
            "it has a forward() of its own, which may do more than call its modules in turn",
            advice,
        )
    from framework.models.layer_specs import is_pipeline

    if is_pipeline(model):
        reason = "the PipelineModule is built already, with the layers of one stage"
        return reason, "give its list of layers, or a function that returns the PipelineModule"
    if not isinstance(model, _SEQUENCES):
        reason = "it is not a sequence of layers, so only its forward() knows where it can be cut"
        return reason, f"make it an nn.Sequential, return a list of layers, or {advice}"
    return "it is a sequence of no layers", "put at least one into it"


def _layers_by_method(model: nn.Module) -> list[Layer]:
    """Return the layers that a module's method `layers()` lists; it must leave no weight out.

    Raises:
        ConfigError: kind ``model-not-layered``: the method fails, or returns something else; kind
            ``model-layers-incomplete``: it leaves out a weight or a buffer.
    """
    refusal = partial(ConfigError.of, key="model", value=type(model).__name__)
    fix = 'return [("stem", self.stem), ...]'
    try:
        returned: Any = model.layers()  # type: ignore[operator]
        if isinstance(returned, Iterable):
            returned = list(returned)
    except Exception as error:
        reason = f"its layers() fails: {in_one_line(error)}"
        raise refusal("model-not-layered", reason, fix) from error
    pairs: list[tuple[str, Any]] = []
    with suppress(TypeError, ValueError):  # no sequence, or none of pairs
        pairs = [(str(name), module) for name, module in returned]
    if not pairs or not all(isinstance(module, nn.Module) for _, module in pairs):
        reason = "its layers() does not return (name, module) pairs"
        raise refusal("model-not-layered", reason, fix)
    listed: set[int] = set()
    for _, module in pairs:
        listed.update(map(id, module.parameters()))
        listed.update(map(id, module.buffers()))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if id(tensor) not in listed:
            reason = f"its layers() leaves out {name}"
            fix = "name the module that holds it"
            raise refusal("model-layers-incomplete", reason, fix)
    return [_built_layer(name, module) for name, module in pairs]


def _layers_of_items(sequence: Any) -> list[Layer]:
    """Return the layers of a sequence, named as in an `nn.Sequential`.

    Raises:
        ConfigError: kind ``model-not-layered``: an item is no layer; kind ``tied-layers-differ``.
    """
    layers: list[Layer] = []
    for number, (name, item) in enumerate(_named_items(sequence).items()):
        if isinstance(item, nn.Module):
            layers.extend(_flat_layers(name, item))
        elif isinstance(item, Layer):
            layers.append(item)
        else:
            layers.append(_other_layer(name, item, number, sequence))
    return layers


def _other_layer(name: str, item: Any, number: int, sequence: Sequence[Any]) -> Layer:
    """Return the layer of an item that is neither a module nor a `Layer`.

    Raises:
        ConfigError: as `_layers_of_items`.
    """
    from framework.models.layer_specs import Function, is_spec, name_of, why_no_function

    if is_spec(item):
        return _layer_of_spec(name, item, sequence)
    refusal = why_no_function(item)
    if refusal is not None:
        reason, fix = refusal
        reason = f"item {number} of the list ({name_of(item)}) {reason}"
        raise ConfigError.of("model-not-layered", reason, fix, "model", "list")
    return _built_layer(name, Function(item))


def _layer_of_spec(name: str, spec: Any, sequence: Sequence[Any]) -> Layer:
    """Return DeepSpeed's recipe of a layer as ours; `sequence` has the others of its tie.

    Raises:
        ConfigError: kind ``tied-layers-differ``.
    """
    from framework.models.layer_specs import is_tied

    if not is_tied(spec):
        return Layer(name, spec.build)
    first = next(item for item in sequence if is_tied(item) and item.key == spec.key)
    if spec.typename is not first.typename:
        reason = (
            f"it is a {spec.typename.__name__}, and the first layer of its tie {spec.key} a "
            f"{first.typename.__name__}: one stage that holds both would have one module of them"
        )
        fix = f"make both a {first.typename.__name__}, and give the second a forward_fn"
        raise ConfigError.of("tied-layers-differ", reason, fix, "model", f"item {name}")
    return Layer(
        name,
        spec.build,
        call=spec.forward_fn,
        tied=spec.key,
        tied_weights=tuple(spec.tied_weight_attr),
    )


def _flat_layers(name: str, module: nn.Module) -> Iterator[Layer]:
    """Yield the layers of nested plain sequences.

    A subclass of `nn.Sequential` may do more in its forward, and is one layer.
    """
    if type(module) is nn.Sequential and len(module):
        for child_name, child in _named_items(module).items():
            yield from _flat_layers(f"{name}.{child_name}", child)
    else:
        yield _built_layer(name, module)


def _named_items(sequence: Any) -> dict[str, Any]:
    """Return the items of a sequence by name, in the order in which forward() calls them.

    `named_children` would leave out a module that stands in the sequence twice.
    """
    if isinstance(sequence, nn.Module):
        children = sequence._modules
        return {name: child for name, child in children.items() if child is not None}
    return {str(number): item for number, item in enumerate(sequence)}


def _built_layer(name: str, module: nn.Module) -> Layer:
    return Layer(name, _getter(module), is_built=True)


def _getter(module: nn.Module) -> Callable[[], nn.Module]:
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
