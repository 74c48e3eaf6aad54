"""Names of the weights that an optimizer of stage 0 steps, found by their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

# In half precision at stage 0: DeepSpeed wraps the optimizer, and keeps the fp32 weights one by one
# or flattened.
INNER: Final = "optimizer_state_dict"
COPIES: Final = "fp32_groups"
FLAT: Final = "fp32_groups_flat"


def names_by_shape(content: Mapping[str, Any]) -> list[list[str]]:
    """List the names of the weights that the optimizer of a ``mp_rank_00_model_states.pt`` steps,
    group by group. Empty if the names cannot be derived, so that its state stays unread.

    At stage 0 the optimizer only numbers its parameters, and another program than ours notes no
    names. The weights of a group lie in it in the order of the module, if it was made from
    `module.parameters()`; their shapes show which belong to which group, and in half precision
    their values.
    """
    optimizer = content.get("optimizer") or {}
    weights = _parameters(content)
    flats: Sequence[torch.Tensor] = optimizer.get(FLAT, ())
    if flats:
        return _names_of_flat_copy(flats, weights)
    groups = _shapes_in_groups(optimizer)
    names = _names_in_groups(groups, weights)
    if _are_copies(optimizer.get(COPIES, ()), names, weights):
        return names
    return []


def _names_of_flat_copy(
    flats: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Return the names of all weights if they lie end to end in one tensor; otherwise, or with
    several groups, nothing is known.
    """
    sizes = [weight.numel() for weight in weights.values()]
    names = [list(weights)]
    is_whole = len(flats) == 1 and flats[0].numel() == sum(sizes)
    if is_whole and _are_copies([list(torch.split(flats[0], sizes))], names, weights):
        return names
    return []


def _names_in_groups(
    groups: Sequence[Sequence[torch.Size]], weights: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Return the names of the weights in each group, by shape; empty if two groups hold weights of
    one shape, or the weights do not have these shapes in this order.
    """
    group_of: dict[torch.Size, int] = {}
    for number, members in enumerate(groups):
        for shape in members:
            if group_of.setdefault(shape, number) != number:
                return []
    names: list[list[str]] = [[] for _ in groups]
    shapes: list[list[torch.Size]] = [[] for _ in groups]
    for name, weight in weights.items():
        if weight.shape in group_of:
            number = group_of[weight.shape]
            names[number].append(name)
            shapes[number].append(weight.shape)
    if shapes != groups:
        return []
    return names


def _are_copies(
    copies: Sequence[Sequence[torch.Tensor]],
    names: Sequence[Sequence[str]],
    weights: Mapping[str, torch.Tensor],
) -> bool:
    """Check that the weights are the rounded fp32 copies, as in half precision; otherwise the order
    is another one.
    """
    for group, members in zip(copies, names, strict=False):
        for copy, name in zip(group, members, strict=True):
            weight = weights[name]
            rounded = copy.detach().to(weight.dtype)
            if not torch.equal(rounded.flatten(), weight.detach().flatten()):
                return False
    return True


def _parameters(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the module's weights in its order, each under its first name."""
    buffers = set(content["buffer_names"])
    seen = set()
    weights = {}
    for name, tensor in content["module"].items():
        memory = (tensor.data_ptr(), tensor.shape)
        if name not in buffers and memory not in seen:
            seen.add(memory)
            weights[name] = tensor
    return weights


def _shapes_in_groups(optimizer: Mapping[str, Any]) -> list[list[torch.Size]]:
    """Return the shapes that the optimizer steps, group by group: of its copies in half precision,
    otherwise of its state. Empty without state (plain SGD), or if a weight has no axis.
    """
    groups = []
    if COPIES in optimizer:
        for copies in optimizer[COPIES]:
            groups.append([copy.shape for copy in copies])
        return groups
    inner = optimizer.get(INNER, optimizer)
    states = inner.get("state", {})
    for group in inner.get("param_groups", ()):
        shapes = []
        for number in group["params"]:
            shape = _first_shape(states.get(number, {}))
            if shape is None:
                return []
            shapes.append(shape)
        groups.append(shapes)
    return groups


def _first_shape(state: Mapping[str, Any]) -> torch.Size | None:
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape
    return None
