"""Names and numbers of elements in a model's state, and in the files of a checkpoint.

At ZeRO stage 3 DeepSpeed writes empty tensors into the module's state, and the numbers into two
other places: one for the optimizer's weights and one for frozen weights (0.19.8, engine.py
`_save_checkpoint`). The numbers of other weights are in no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from framework.checkpoint.state.weight_parts import whole_shape


def state_of(module: torch.nn.Module, *, partly: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a module that a checkpoint holds, by each of their names; without
    frozen weights if `partly` is set.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if not (partly and is_frozen(tensor)):
            tensors[name] = tensor
    return tensors


def is_frozen(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is a weight, not a buffer, that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def further_names(module: torch.nn.Module, *, partly: bool = False) -> dict[str, str]:
    """Return the further names of spread weights, each with the weight's first name, which
    DeepSpeed uses.
    """
    first_names = {id(weight): name for name, weight in module.named_parameters()}
    further: dict[str, str] = {}
    for name, tensor in state_of(module, partly=partly).items():
        first = first_names.get(id(tensor), name)
        if first != name and hasattr(tensor, "ds_id"):
            further[name] = first
    return further


def num_elements(tensor: Any) -> int:
    """Count the elements of a tensor; of a spread weight on all ranks together."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def held_elements(content: Mapping[str, Any]) -> dict[str, int]:
    """Count the elements of each name in a file of model states, and in the optimizer's files
    beside it.
    """
    counts: dict[str, int] = {}
    for name, tensor in (content.get("module") or {}).items():
        if isinstance(tensor, torch.Tensor):
            counts[name] = tensor.numel()
    all_shapes = list(content.get("param_shapes") or ())
    all_shapes.append(content.get("frozen_param_shapes") or {})
    for shapes in all_shapes:
        counts |= {name: shape.numel() for name, shape in shapes.items()}
    return counts


def lacking_names(
    module: torch.nn.Module, held: Mapping[str, int], *, partly: bool = False
) -> list[str]:
    """List the names of a module's tensors that are incomplete: `held` has the numbers of elements
    in files, by any name of a tensor.
    """
    complete: set[int] = set()
    for name, tensor in _every_name(module):
        # The optimizer's files hold each rank's part of divided experts, the module's all of them.
        if held.get(name) in (num_elements(tensor), whole_shape(tensor).numel()):
            complete.add(id(tensor))
    state = state_of(module, partly=partly)
    return [name for name, tensor in state.items() if id(tensor) not in complete]


def _every_name(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from state_of(module).items()
    yield from module.named_parameters()  # a module may rename its state
