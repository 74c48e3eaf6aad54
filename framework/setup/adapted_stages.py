"""Adapters in the layers of a pipeline's stages.

peft puts adapters into one model, by the full names of its modules, and draws them one after the
other. So all layers become one model for that: the layers of this rank's stage with their weights,
all others on torch's meta device, which holds no numbers. A stage then draws the same adapters as
one process with the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from framework.config.groups import tied_problem
from framework.config.training import LoRA
from framework.errors import ConfigError
from framework.models.adapters import add_adapters, is_adapter
from framework.models.layers import Layer, first_of_ties, register_module
from framework.models.survey import meta_module

Put = Callable[[nn.Module, str], object]
"""Puts first weights into the module of a layer, given its name."""

Add = Callable[..., nn.Module]
"""Puts adapters into a model, as `add_adapters` does."""


def adapted_model(
    layers: Sequence[Layer],
    lora: LoRA,
    *,
    seed: int,
    built: Collection[str] = (),
    put: Put = lambda module, name: None,
    add: Add = add_adapters,
) -> nn.Module:
    """Return all layers as one model with adapters; of tied ones the first alone.

    Args:
        layers: of the whole model.
        lora: which modules, and how.
        seed: of weights and adapters.
        built: names of the layers with numbers; all others are on the meta device.
        put: called with every layer that has numbers, before it gets adapters.
        add: puts the adapters into the model that all layers become.

    Raises:
        ConfigError: as `add_adapters`.
    """
    whole = nn.Module()
    ties = first_of_ties(layers)
    for number, layer in enumerate(layers):
        if layer.tied and ties[layer.tied] != layer.name:
            continue
        if layer.name in built:
            module = layer.make(number, seed=seed)
            put(module, layer.name)
        else:
            module = meta_module(layer, number, seed)
        register_module(whole, layer.name, module)
    whole = add(whole, lora, seed=seed)
    adapted = {
        name.partition(".lora_")[0] for name, _ in whole.named_parameters() if is_adapter(name)
    }
    shared = sorted(adapted.intersection(ties.values()))
    if shared:
        raise ConfigError([tied_problem(shared[0], lora.target_modules)])
    return whole


def trained_shapes_of_layers(
    layers: Sequence[Layer], lora: LoRA, *, seed: int
) -> Mapping[str, Mapping[str, torch.Size]]:
    """Return name of a layer -> name within it -> shape, of all that is trained.

    Raises:
        ConfigError: as `add_adapters`.
    """
    whole = adapted_model(layers, lora, seed=seed)
    held = dict(whole.named_modules())
    shapes: dict[str, dict[str, torch.Size]] = {}
    for layer in layers:
        shapes[layer.name] = {}
        if layer.name in held:
            for name, parameter in held[layer.name].named_parameters():
                if parameter.requires_grad:
                    shapes[layer.name][name] = parameter.shape
    return shapes


def adapted_layers(
    layers: Sequence[Layer],
    lora: LoRA,
    *,
    seed: int,
    start: int,
    stop: int,
    put: Put,
    add: Add = add_adapters,
) -> tuple[tuple[Layer, ...], nn.Module]:
    """Return the layers, those from `start` up to, but without, `stop` built and with adapters; and
    the whole model that they are in, its other layers without numbers.

    Raises:
        ConfigError: as `add_adapters`.
    """
    firsts = first_of_ties(layers)
    built = {firsts.get(layer.tied, layer.name) for layer in layers[start:stop]}
    whole = adapted_model(layers, lora, seed=seed, built=built, put=put, add=add)
    adapted: list[Layer] = []
    for layer in layers:
        place = firsts.get(layer.tied, layer.name)
        if place in built:
            module = whole.get_submodule(place)
            layer = replace(layer, build=_getter(module), is_built=True)
        adapted.append(layer)
    return tuple(adapted), whole


def _getter(module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: module
