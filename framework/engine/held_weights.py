"""Names and numbers of elements of a model's state, and of what the files of a checkpoint hold of
it.

At ZeRO stage 3 DeepSpeed writes empty tensors into the module's state, and the numbers into two
other places: those of the optimizer's weights and those of frozen ones (0.19.8, engine.py
`_save_checkpoint`). What is neither is nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def state_of(module: torch.nn.Module, *, partly: bool = False) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of a module, by name, further names included; `partly`:
    without frozen weights.
    """
    state = module.state_dict(keep_vars=True)
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    if not partly:
        return tensors
    return {
        name: one
        for name, one in tensors.items()
        if one.requires_grad or not isinstance(one, torch.nn.Parameter)
    }


def further_names(module: torch.nn.Module, *, partly: bool = False) -> dict[str, str]:
    """Return further names of a module's spread weights -> its first, by which DeepSpeed knows
    it.
    """
    first = {id(weight): name for name, weight in module.named_parameters()}
    state = state_of(module, partly=partly)
    named = {name: first.get(id(one), name) for name, one in state.items() if hasattr(one, "ds_id")}
    return {name: own for name, own in named.items() if own != name}


def num_elements(tensor: Any) -> int:
    """Count the elements of a tensor, of a spread one those of all ranks."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def held_elements(content: Mapping[str, Any]) -> dict[str, int]:
    """Count the elements of each name in a file of model states, and in the optimizer's files
    beside it.
    """
    module = content.get("module") or {}
    counts = {name: one.numel() for name, one in module.items() if isinstance(one, torch.Tensor)}
    for shapes in (*(content.get("param_shapes") or ()), content.get("frozen_param_shapes") or {}):
        counts |= {name: shape.numel() for name, shape in shapes.items()}
    return counts


def lacking_names(
    module: torch.nn.Module, held: Mapping[str, int], *, partly: bool = False
) -> list[str]:
    """List the names of a module whose elements are not all held, under this name or a further
    one.
    """
    complete = {id(one) for name, one in _every_name(module) if held.get(name) == num_elements(one)}
    return [
        name for name, one in state_of(module, partly=partly).items() if id(one) not in complete
    ]


def _every_name(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from state_of(module).items()
    yield from module.named_parameters()  # a module may rename its state
