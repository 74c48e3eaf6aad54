"""Division of packed experts (`framework.models.packed_experts`) over the ranks of a tensor group,
and of those that a tensor rank has over an expert group: each keeps its part of their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn

from framework.checkpoint.state.tensor_split import RankPart, Split
from framework.checkpoint.state.weight_parts import EXPERT_PART
from framework.errors import ConfigError
from framework.models.packed_experts import divided_experts, find_packed
from framework.models.split import TensorPart


def divide_packed(model: nn.Module, group: Any, *, prefix: str = "") -> None:
    """Leave this rank's experts alone in every module of packed experts, in place.

    Args:
        model: whole, or a layer of it, with the same weights on all ranks of the group.
        group: the ranks that share the experts.
        prefix: of the names of its modules in the whole model.

    Raises:
        ConfigError: kinds ``expert-without-moe``, ``experts-not-divisible``.
    """
    for name, module in find_packed(model).items():
        _divide(f"{prefix}{name}", module, group)


def refuse_undividable(model: nn.Module, size: int) -> None:
    """Refuse a model whose experts `size` ranks cannot share.

    Raises:
        ConfigError: kinds ``expert-without-moe``, ``experts-not-divisible``.
    """
    refuse_without_packed(model, size)
    for name, module in find_packed(model).items():
        _refuse_undivided(name, module, "parallel.expert", size)


def refuse_without_packed(model: nn.Module, size: int) -> None:
    """Refuse a model without packed experts that `size` ranks could share.

    Raises:
        ConfigError: kind ``expert-without-moe``.
    """
    if find_packed(model):
        return
    raise ConfigError.of(
        "expert-without-moe",
        f"{type(model).__name__} has no experts that can be divided: they are packed, as in "
        "transformers 5, in weights of (experts, ...) of a module with "
        "use_experts_implementation",
        "set parallel.expert: 1",
        "parallel.expert",
        size,
    )


def divide_over_tensor_ranks(
    name: str,
    module: Any,
    part: TensorPart,
    divide: Callable[[str, nn.Parameter, Split], None],
) -> None:
    """Leave one module with this rank's experts of a tensor group, which has the same tokens.

    Args:
        name: of the module in the whole model.
        module: with packed experts, all of them.
        part: this rank's place in the tensor group.
        divide: leaves this rank's part in a weight of a name.

    Raises:
        ConfigError: kinds ``expert-without-moe``, ``experts-not-divisible``.
    """
    _refuse_undivided(name, module, "parallel.tensor", part.size)
    for weight_name, weight in module.named_parameters(recurse=False):
        divide(f"{name}.{weight_name}", weight, Split(0, (module.num_experts,)))
    module.num_experts //= part.size
    module.part = part
    divided_experts(module)


def _divide(name: str, module: Any, group: Any) -> None:
    """Leave one module with this rank's experts, and have it exchange tokens."""
    size = torch.distributed.get_world_size(group)
    rank = torch.distributed.get_rank(group)
    _refuse_undivided(name, module, "parallel.expert", size)
    part = RankPart(Split(0, (module.num_experts,)), rank, size)
    for weight in module.parameters(recurse=False):
        weight.data = part.of(weight.data).clone()
        vars(weight)[EXPERT_PART] = part
    module.num_experts //= size
    divided_experts(module).group = group


def _refuse_undivided(name: str, module: Any, key: str, size: int) -> None:
    """Refuse experts that the ranks of a key's groups cannot share.

    Raises:
        ConfigError: kinds ``expert-without-moe``, ``experts-not-divisible``.
    """
    num_experts = module.num_experts
    for weight_name, weight in module.named_parameters(recurse=False):
        if weight.ndim == 0 or weight.shape[0] != num_experts:
            raise ConfigError.of(
                "expert-without-moe",
                f"{name}.{weight_name} has the shape {tuple(weight.shape)}, and its first "
                f"dimension is not that of the {num_experts} experts",
                f"set {key}: 1",
                key,
                size,
            )
    if num_experts % size:
        raise ConfigError.of(
            "experts-not-divisible",
            f"the {num_experts} experts of {name} on a rank cannot be split evenly over {size}",
            f"set {key} to a divisor of {num_experts}",
            key,
            size,
        )
