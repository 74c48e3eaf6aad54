"""At stage 0 DeepSpeed's optimizer numbers what it steps. Our own checkpoints note the names; for others they are found
here.

The weights of a group lie in it in the order of the module, wherever a group was made from `module.parameters()`. Which
weights belong to which group is told by their shapes, and in half precision by their values; where that is not plain,
nothing is said, and the optimizer's state stays unread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def names_by_shape(content: Mapping[str, Any]) -> list[list[str]]:
    """Names of what the optimizer steps, group by group; empty where they cannot be told.

    Args:
        content: of ``mp_rank_00_model_states.pt``.
    """
    optimizer = content.get("optimizer") or {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    weights = _parameters(content)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    flats: Sequence[torch.Tensor] = optimizer.get("fp32_groups_flat", ())
    if flats:  # laid end to end: where there is one group, it is everything or it is not known
        sizes = [shape.numel() for shape in shapes.values()]
        whole = len(flats) == 1 and flats[0].numel() == sum(sizes)
        return (
            [list(shapes)]
            if whole and _are_copies([list(torch.split(flats[0], sizes))], [list(shapes)], weights)
            else []
        )
    groups = _shapes_in_groups(optimizer, inner)
    group_of = {shape: number for number, members in enumerate(groups) for shape in members}
    if sum(len(set(members)) for members in groups) != len(group_of):
        return []  # two groups hold weights of one shape
    found = [[name for name, shape in shapes.items() if group_of.get(shape) == number] for number in range(len(groups))]
    reported = [[shapes[name] for name in names] for names in found]
    return found if reported == groups and _are_copies(optimizer.get("fp32_groups", ()), found, weights) else []


def _are_copies(
    copies: Sequence[Sequence[torch.Tensor]], names: Sequence[Sequence[str]], weights: Mapping[str, torch.Tensor]
) -> bool:
    """In half precision the weights are the rounded copies: where they are not, the order is another one."""
    pairs = (
        (copy, weights[name])
        for group, members in zip(copies, names, strict=False)
        for copy, name in zip(group, members, strict=True)
    )
    return all(
        torch.equal(copy.detach().to(weight.dtype).flatten(), weight.detach().flatten()) for copy, weight in pairs
    )


def _parameters(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The module's weights in its order, each under its first name."""
    buffers, seen = set(content["buffer_names"]), set()
    found = {}
    for name, tensor in content["module"].items():
        one = (tensor.data_ptr(), tensor.shape)
        if name not in buffers and one not in seen:
            seen.add(one)
            found[name] = tensor
    return found


def _shapes_in_groups(optimizer: Mapping[str, Any], inner: Mapping[str, Any]) -> list[list[torch.Size]]:
    """What every group steps, by its copies in half precision and by the optimizer's state otherwise."""
    if "fp32_groups" in optimizer:
        return [[copy.shape for copy in copies] for copies in optimizer["fp32_groups"]]
    states = inner.get("state", {})
    numbers = [list(group["params"]) for group in inner.get("param_groups", ())]
    spread = {
        number: [value.shape for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
        for number, state in states.items()
    }
    if any(not spread.get(number) for group in numbers for number in group):
        return []  # an optimizer without state, such as plain SGD, or weights that have no axis
    return [[spread[number][0] for number in group] for group in numbers]
