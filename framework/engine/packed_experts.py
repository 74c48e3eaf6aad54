"""Division of packed experts (`framework.models.packed_experts`) over the ranks of a group: each
keeps its part of their weights, and the modules exchange tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import nn

from framework.checkpoint.state.tensor_split import EXPERT_PART, RankPart, Split
from framework.errors import ConfigError
from framework.models.packed_experts import ExpertExchange, find_packed


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


def _divide(name: str, module: Any, group: Any) -> None:
    """Leave one module with this rank's experts, and have it exchange tokens."""
    size = torch.distributed.get_world_size(group)
    rank = torch.distributed.get_rank(group)
    num_experts = module.num_experts
    for weight_name, weight in module.named_parameters(recurse=False):
        if weight.ndim == 0 or weight.shape[0] != num_experts:
            raise ConfigError.of(
                "expert-without-moe",
                f"{name}.{weight_name} has the shape {tuple(weight.shape)}, and its first "
                f"dimension is not that of the {num_experts} experts",
                "set parallel.expert: 1",
                "parallel.expert",
                size,
            )
    if num_experts % size:
        raise ConfigError.of(
            "experts-not-divisible",
            f"the {num_experts} experts of {name} cannot be split evenly over {size} ranks",
            f"set parallel.expert to a divisor of {num_experts}",
            "parallel.expert",
            size,
        )
    part = RankPart(Split(0, (num_experts,)), rank, size)
    for weight in module.parameters(recurse=False):
        weight.data = part.of(weight.data).clone()
        vars(weight)[EXPERT_PART] = part
    module.num_experts = num_experts // size
    exchange = ExpertExchange(module, module.forward, group, num_experts)
    # Not compiled: how many rows travel is known on the host alone.
    module.forward = torch.compiler.disable(exchange.forward)  # type: ignore[no-untyped-call]
