"""Which weights an optimizer pulls towards zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn


def parameter_groups(
    parameters: Iterable[nn.Parameter], *, weight_decay: float, weight_decay_on: Literal["all", "matrices"]
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """What an optimizer is given to train.

    Args:
        parameters: those that require a gradient are taken.
        weight_decay: of the weights that have any.
        weight_decay_on: ``all``, or ``matrices``: not on tensors with fewer than two dimensions, which are biases and
            norms.

    Returns:
        The parameters, where all are treated the same; otherwise a group with decay and one without, in this order.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if weight_decay_on == "all" or not weight_decay:
        return trained
    matrices = [parameter for parameter in trained if is_matrix(whole_shape(parameter))]
    others = [parameter for parameter in trained if not is_matrix(whole_shape(parameter))]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape counts as one: with fewer than two dimensions it is a bias, or belongs to a
    norm.
    """
    return len(shape) >= 2


def whole_shape(parameter: nn.Parameter) -> Sequence[int]:
    """Shape of the whole tensor; ZeRO-3 leaves a flat, empty one in its place and notes the shape as `ds_shape`."""
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)
    return shape
