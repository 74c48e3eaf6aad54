"""Changes that a config makes to any `nn.Module` before the engine takes it, and its optimizer's parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from framework.config.training import Training
from framework.errors import ConfigError, Problem
from framework.models.layers import LayeredModel, as_layers
from framework.models.sync_batch_norm import with_sync_batch_norm
from framework.text.typos import nearest


def prepare_model(model: nn.Module, training: Training) -> nn.Module:
    """Freeze, synchronise batch norms, recompute: whatever `training` asks for.

    `channels_last` changes the images alone (the function below), and convolutions follow them. Weights stay as they
    are: DeepSpeed 0.19.8 refuses others (runtime/engine.py `_broadcast_model` views them as bytes).

    Returns:
        The model, changed in place (it may be partitioned by ZeRO-3), or a `LayeredModel` around the same layers, with
        the same names of weights, where recomputation needs one.

    Raises:
        ConfigError: a pattern of `freeze` matches nothing or all, or a model that cannot be cut shall be recomputed.
    """
    freeze(model, training.freeze)
    if training.sync_batch_norm:
        model = with_sync_batch_norm(model)
    return with_recompute(model, every=training.recompute_every)


def channels_last(images: Tensor) -> Tensor:
    """Images (batch, channels, height, width) with the channels last in memory; convolutions give their output the same
    order.

    A single channel lies in both orders at once, and convolutions then take the strides at their word.
    """
    images = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    if channels > 1:
        return images
    return images.as_strided(images.shape, (height * width, 1, width, 1))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the gradient from every parameter whose whole name matches a pattern; errors as of `frozen_names`."""
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    frozen = frozen_names(parameters, patterns)
    if patterns and not set(trained) - frozen:
        raise _everything_frozen(patterns)
    for name in frozen:
        parameters[name].requires_grad_(False)


def frozen_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names that a pattern matches from beginning to end.

    Raises:
        ConfigError: kind ``freeze-matches-nothing`` for every pattern without a parameter, ``freeze-matches-all``.
    """
    names = list(names)
    matches = {pattern: {name for name in names if re.fullmatch(pattern, name)} for pattern in patterns}
    if problems := [_nothing_frozen(at, name, names) for at, name in enumerate(patterns) if not matches[name]]:
        raise ConfigError(problems)
    frozen = set().union(*matches.values())
    if patterns and frozen == set(names):
        raise _everything_frozen(patterns)
    return frozen


def with_recompute(model: nn.Module, *, every: int) -> nn.Module:
    """Keep only the input of every group of so many layers for the backward pass; 0: keep everything.

    Raises:
        ConfigError: kind ``recompute-needs-layers``.
    """
    if not every:
        return model
    if not isinstance(model, LayeredModel):
        try:
            model = LayeredModel(as_layers(model))
        except ConfigError as error:
            (problem,) = error.problems
            raise ConfigError.of(
                "recompute-needs-layers",
                f"the model ({problem.value}) cannot be cut into layers: {problem.reason}",
                f"{problem.fix}; or set training.recompute_every: 0",
                "training.recompute_every",
                every,
            ) from error
    model.recompute_every = every
    return model


def _nothing_frozen(number: int, pattern: str, names: Sequence[str]) -> Problem:
    """The names that contain it, for those who expect a search, or else the nearest one."""
    containing = [name for name in names if pattern and re.search(pattern, name)]
    if containing:
        fix = f"it must match the whole name, as in {containing[0]}; write {pattern}.* or .*{pattern}.*"
    else:
        guess = nearest(pattern, names) or (names[0] if names else "")
        fix = f"did you mean {guess}?" if guess else "remove it"
    return Problem(
        "freeze-matches-nothing", "no parameter of the model has such a name", fix, f"training.freeze.{number}", pattern
    )


def _everything_frozen(patterns: Sequence[str]) -> ConfigError:
    return ConfigError.of(
        "freeze-matches-all",
        "nothing would be left to train",
        "leave some parameters out",
        "training.freeze",
        list(patterns),
    )


def parameter_groups(
    parameters: Iterable[nn.Parameter], *, weight_decay: float, weight_decay_on: Literal["all", "matrices"]
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The parameters that require a gradient, where all are treated the same; otherwise a group with decay and one
    without, in this order: ``matrices`` leaves out tensors with fewer than two dimensions, biases and norms.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if weight_decay_on == "all" or not weight_decay:
        return trained
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in trained:  # ZeRO-3 leaves a flat, empty tensor, and notes its shape
        split[is_matrix(getattr(parameter, "ds_shape", parameter.shape))].append(parameter)
    groups = [{"params": split[1], "weight_decay": weight_decay}, {"params": split[0], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_matrix(shape: Sequence[int]) -> bool:
    """Check whether a tensor has two dimensions or more: others are biases, or belong to norms."""
    return len(shape) >= 2
