"""Process groups of a layout: the ranks that share samples, positions or weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from framework.engine.workarounds.group_limits import limit_of_ranks
from framework.plan.layout import Layout
from framework.tasks.task import Positions

if TYPE_CHECKING:
    from framework.models.sequence import SequenceGroup


@dataclass(frozen=True)
class RankGroups:
    """The groups of this rank.

    Attributes:
        tensor: ranks that share split weights, in the order of their parts.
        sequence: ranks that share the positions of the same samples, in the order of their parts.
        data: ranks that hold the same weights and average their gradients: DeepSpeed's
            data-parallel ranks, with other samples or other positions of the same samples.
    """

    tensor: Any
    sequence: Any
    data: Any

    # Methods that DeepSpeed calls on its argument `mpu`, with Megatron-LM's names
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


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of this rank for experts.

    Attributes:
        experts: ranks with other tokens that share the experts of a mixture, in the order of the
            experts.
        replicas: ranks that hold the same experts, and average their gradients.
    """

    experts: Any
    replicas: Any


def make_expert_groups(layout: Layout) -> ExpertGroups:
    """Make the groups of a layout for experts: ranks that follow each other among those that hold
    the same other weights share experts. Collective.
    """
    num_groups = layout.num_replicas // layout.expert_size
    shape = (layout.pipe_size, num_groups, layout.expert_size, layout.tensor_size)
    ranks = torch.arange(layout.world_size).view(shape)
    return ExpertGroups(
        experts=make_group(ranks.movedim(2, -1).flatten(0, 2)),
        replicas=make_group(ranks.movedim(1, -1).flatten(0, 2)),
    )


def make_groups(layout: Layout) -> RankGroups:
    """Make the groups of a layout, with the time limit of the default group. Collective."""
    shape = (layout.pipe_size, layout.data_parallel_size, layout.sequence_size, layout.tensor_size)
    # Neighbouring ranks are in one tensor group. Each group is a row of ranks that are alike in all
    # other dimensions of `shape`.
    ranks = torch.arange(layout.world_size).view(shape)
    return RankGroups(
        tensor=make_group(ranks.flatten(0, 2)),
        sequence=make_group(ranks.movedim(2, -1).flatten(0, 2)),
        data=make_group(ranks.movedim(3, 1).reshape(layout.pipe_size * layout.tensor_size, -1)),
    )


def sequence_group(layout: Layout, positions: Positions) -> SequenceGroup:
    """Make the group of the ranks that share this rank's sequences, of which it has `positions`.
    Collective.
    """
    from framework.models.sequence import SequenceGroup

    return SequenceGroup(positions.rank, positions.size, make_groups(layout).sequence)


def make_group(rows: torch.Tensor) -> Any:
    """Make a group of every row of ranks, and return the one that this rank is in. Collective."""
    rank_group = None
    for row in rows.tolist():
        group = torch.distributed.new_group(row, timeout=limit_of_ranks())
        if torch.distributed.get_rank() in row:
            rank_group = group
    return rank_group
