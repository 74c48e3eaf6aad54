"""Finds the layers of a model: in an `nn.Sequential`, in a list of modules, functions and
DeepSpeed's `LayerSpec`s, in a `PipelineModule` and in any module with a method `layers()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Final

from torch import nn

from framework.errors import ConfigError, in_one_line
from framework.models.layers import Layer, LayeredModel, getter_of

_SEQUENCES: Final = (nn.Sequential, nn.ModuleList, list, tuple)


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
    return Layer(name, getter_of(module), is_built=True)
