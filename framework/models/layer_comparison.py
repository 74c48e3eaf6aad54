"""A module that tells its layers says how to run it a second time; here the two are compared before anything trains.

A pipeline and recomputation run the layers and never the module's own `forward()`: what that does beside calling them
(a relu, a residual, a flatten) would be left out without a word, and another model be trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from framework.errors import ConfigError, Problem
from framework.models.layers import as_layers

# The same operations on the same device give the same numbers; a module may still write them down in another way.
_RELATIVE: Final = 1e-4
_FEW_SAMPLES: Final = 2
# Beyond these nothing is compared: a start must not wait for minutes, nor hold such a model three times.
_MOST_WEIGHTS: Final = 500_000_000
_MOST_PRODUCTS: Final = 100_000_000_000  # weights x tokens: some seconds on one thread


def refuse_untrue_layers(model: nn.Module, inputs: Any, *, seed: int, key: str = "model") -> None:
    """Run `forward()` and the layers once, in evaluation mode, on a few samples, and compare what comes out.

    Both run on copies, because modules may keep things (a cache, a counter). Where one of them does not run here, where
    copies cannot be made, where the model is very large or gives other numbers each time, nothing can be compared and
    nothing is said.

    Args:
        model: with its weights; neither it nor the inputs are touched.
        inputs: of one micro-batch, on the CPU: a tensor or a tuple of tensors.
        seed: for both runs.
        key: the config section that a problem names.

    Raises:
        ConfigError: kind ``layers-differ-from-forward``.
    """
    inputs = _few(inputs)
    if _is_too_much(model, inputs):
        return

    def outputs(run: Callable[[nn.Module, Any], Any]) -> tuple[list[Any], Any]:
        own, values = copy.deepcopy((model, inputs))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            return tree_flatten(run(own.eval(), values))

    try:
        own, reported = outputs(_forward), outputs(_in_turn)
        difference = _difference(own, reported)
        is_noise = bool(difference) and bool(_difference(own, outputs(_forward)))
    except Exception:  # whatever code for another device raises here
        return
    if difference and not is_noise:
        raise ConfigError(
            Problem(
                kind="layers-differ-from-forward",
                key=key,
                value=type(model).__name__,
                reason=f"its layers(), one after the other, do not give what its forward() gives: {difference}",
                fix="put what forward() does beside calling them (a relu, a flatten) into modules, and name those in "
                "layers() too",
            )
        )


def _is_too_much(model: nn.Module, inputs: Any) -> bool:
    """By its weights, and for token numbers by how many of them pass each weight."""
    num_weights = sum(weight.numel() for weight in model.parameters())
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    return (
        num_weights > _MOST_WEIGHTS
        or num_weights * (1 if first.is_floating_point() else first.numel()) > _MOST_PRODUCTS
    )


def _forward(model: nn.Module, inputs: Any) -> Any:
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _in_turn(model: nn.Module, value: Any) -> Any:
    for layer in as_layers(model):
        value = layer.apply(layer.build().eval(), value)
    return value


def _few(inputs: Any) -> Any:
    """The first samples, where the tensors agree on how many there are: whole micro-batches take their time on a
    CPU.
    """
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
        return inputs
    few = tuple(tensor[:_FEW_SAMPLES] for tensor in tensors)
    return few if isinstance(inputs, tuple) else few[0]


def _difference(own: tuple[list[Any], Any], reported: tuple[list[Any], Any]) -> str:
    """In words; empty where there is none, and where they say different things: ``(logits, None)`` of a forward() that
    may be given targets, a dict, logits of the last position only."""
    outputs, others = ([leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves, _ in (own, reported))
    is_same_form = own[1] == reported[1]
    if not is_same_form and (len(outputs) != 1 or len(others) != 1 or outputs[0].shape != others[0].shape):
        return ""
    for one, other in zip(outputs, others, strict=True):
        if one.shape != other.shape:
            return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
        one, other = one.double(), other.double()
        largest = float((one - other).abs().nan_to_num(0.0).max()) if one.numel() else 0.0
        if not torch.equal(one.isnan(), other.isnan()) or largest > _RELATIVE * (
            float(one.abs().nan_to_num(0.0).max()) + 1e-30
        ):
            return f"numbers that differ by {largest:.3g}"
    return ""
