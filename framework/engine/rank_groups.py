"""Process groups of a layout: the ranks that share samples, positions or weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from framework.engine.workarounds.group_limits import limit_of_ranks
from framework.plan.layout import Layout


@dataclass(frozen=True)
class RankGroups:
    """The groups of this rank.

    Attributes:
        tensor: ranks that share split weights, in the order of their parts.
        sequence: ranks that share the positions of the same samples, in the order of their parts.
        data: ranks that hold the same weights, and whose gradients are averaged: DeepSpeed's
            data-parallel ranks, of other samples or of other positions of the same ones.
    """

    tensor: Any
    sequence: Any
    data: Any

    # What DeepSpeed asks of its argument `mpu`, under Megatron-LM's names
    # (deepspeed/utils/groups.py).

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self.data)

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self.tensor)


def make_groups(layout: Layout) -> RankGroups:
    """Make the groups of a layout, with the time limit of the default group. Collective."""
    shape = (layout.pipe_size, layout.data_parallel_size, layout.sequence_size, layout.tensor_size)
    ranks = torch.arange(layout.world_size).view(shape)
    return RankGroups(
        tensor=_own_of(ranks.flatten(0, 2)),
        sequence=_own_of(ranks.movedim(2, -1).flatten(0, 2)),
        data=_own_of(ranks.movedim(3, 1).reshape(layout.pipe_size * layout.tensor_size, -1)),
    )


def _own_of(rows: torch.Tensor) -> Any:
    """Make a group of every row on all ranks, and return the one that this rank is in."""
    own = None
    for row in rows.tolist():
        group = torch.distributed.new_group(row, timeout=limit_of_ranks())
        if torch.distributed.get_rank() in row:
            own = group
        else:
            own = own
    return own
