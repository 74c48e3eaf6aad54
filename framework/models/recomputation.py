"""Recomputation of layers in the backward pass, in place of keeping their activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from framework.errors import ConfigError, in_one_line
from framework.models.layer_lists import as_layers
from framework.models.layers import CHECKPOINT_OPTIONS, LayeredModel, keeps_nothing


def with_recompute(model: nn.Module, *, every: int, keeps_products: bool = False) -> nn.Module:
    """Return the model with layers in groups of `every`: only a group's input is kept for the
    backward pass, with `keeps_products` also the outputs of its products. With 0, everything is
    kept.

    A model that cannot be cut into layers, but has a method that turns on its own recomputation, as
    transformers' models have, recomputes each of its layers.

    Raises:
        ConfigError: kind ``recompute-needs-layers``.
    """
    if not every:
        return model
    if not isinstance(model, LayeredModel):
        try:
            model = LayeredModel(as_layers(model), taken_from=model)
        except ConfigError as error:
            return _with_own_checkpointing(
                model, every=every, keeps_products=keeps_products, refusal=error
            )
    model.recompute_every = every
    model.keeps_products = keeps_products
    return model


def can_recompute(model: nn.Module) -> bool:
    """Check whether `with_recompute` with 1 finds layers, or recomputation that the model brings
    along.
    """
    try:
        as_layers(model)
    except ConfigError:
        owners = [getattr(method, "__self__", None) for method in _checkpointing_methods(model)]
        # transformers' models all have the method, which raises where this is false.
        name = "supports_gradient_checkpointing"
        return bool(owners) and all(getattr(owner, name, True) for owner in owners)
    return True


def _with_own_checkpointing(
    model: nn.Module, *, every: int, keeps_products: bool, refusal: ConfigError
) -> nn.Module:
    """Turn on the recomputation that the model, or its parts, bring along, and return the model.

    Raises:
        ConfigError: kind ``recompute-needs-layers``, from `refusal`, which explains why the model
            has no layers: it has no recomputation of its own, that fails, or `every` is not 1.
    """
    (problem,) = refusal.problems
    reason = f"the model ({problem.value}) cannot be cut into layers: {problem.reason}"
    fix = f"{problem.fix}; or set training.recompute_every: 0"
    arguments: list[dict[str, Any]] = []
    if keeps_products:
        from framework.models.kept_products import keeping_products

        # Keyword arguments of torch's `checkpoint`, as transformers' methods take them.
        options = {"use_reentrant": False, "context_fn": partial(keeping_products, keeps_nothing)}
        arguments.append(options | CHECKPOINT_OPTIONS)
    enablers = list(_checkpointing_methods(model))
    try:
        if every == 1:
            for enable in enablers:
                enable(*arguments)
    except Exception as error:  # a ValueError of transformers, or what other code raises
        reason += f"; and its own recomputation cannot be turned on: {in_one_line(error)}"
        enablers = []
    if enablers and every == 1:
        return model
    if enablers:
        reason += "; its own recomputation (gradient_checkpointing_enable) is of each layer"
        fix = "set training.recompute_every: 1, or 0"
    raise ConfigError.of(
        "recompute-needs-layers", reason, fix, "training.recompute_every", every
    ) from refusal


def _checkpointing_methods(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield the methods that turn on recomputation, of the outermost modules that have one."""
    # transformers has renamed it; both names are there until its version 6.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        method = getattr(model, name, None)
        if callable(method):
            yield method
            return
    for child in model.children():
        yield from _checkpointing_methods(child)
