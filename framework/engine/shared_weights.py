"""Places of weights where a rank steps a share of each, and the ranks that step the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed
from torch import Tensor

from framework.checkpoint.state.tensor_split import RankPart, part_of
from framework.checkpoint.state.weight_names import stepped_groups
from framework.checkpoint.state.weight_parts import expert_part_of, split_of
from framework.engine.expert_parallel import group_of_part
from framework.engine.flat_groups import flat_groups
from framework.models import split


class Share(NamedTuple):
    """Numbers of a weight in the tensor that this rank steps.

    Attributes:
        start: where they begin in the weight, or in the rank's part of it, seen as flat.
        offset: where they begin in the stepped tensor.
        num: how many they are; 0: this rank steps none of them.
    """

    start: int
    offset: int
    num: int


@dataclass(frozen=True, eq=False)
class SharedWeight:
    """A weight, or a rank's part of it in a tensor or expert group, and the ranks that step the
    rest of it.

    Attributes:
        weight: of the model.
        shape: of the part.
        share: this rank's numbers of the part.
        part: place of the part in the whole weight; None: it is the whole.
        replicas: process group of the ranks that have shares of this part; empty: this one alone.
        others: process groups of the ranks that have other parts.
    """

    weight: Tensor
    shape: torch.Size
    share: Share
    part: RankPart | None
    replicas: tuple[Any, ...]
    others: tuple[Any, ...]

    @property
    def groups(self) -> tuple[Any, ...]:
        """Process groups over which sums of the whole weight go, one after the other."""
        return self.replicas + self.others

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole weight."""
        if self.part is None:
            return self.shape
        return self.part.split.whole_shape(self.shape)

    def placed(self, sums: Tensor, *, over: int | None = None) -> Tensor:
        """Return sums over the part at their places in the whole weight; zero elsewhere.

        Args:
            sums: in the shape of the part, with size 1 in the dimension that was added up.
            over: that dimension.
        """
        if self.part is None or self.part.split.dim == over:
            return sums
        part = self.part
        whole = sums.new_zeros(part.split.whole_shape(sums.shape))
        offset = 0
        for begin, end in part.split.bounds(part.rank, part.size):
            place = whole.narrow(part.split.dim, begin, end - begin)
            place.copy_(sums.narrow(part.split.dim, offset, end - begin))
            offset += end - begin
        return whole

    def taken(self, whole: Tensor, *, over: int | None = None) -> Tensor:
        """Return what belongs to the part of `whole`, the reverse of `placed`."""
        if self.part is None or self.part.split.dim == over:
            return whole
        return self.part.of(whole)

    def numbers(self, stepped: Tensor) -> Tensor:
        """Return this rank's numbers, a view of the stepped tensor."""
        return stepped.view(-1).narrow(0, self.share.offset, self.share.num)


def shared_weights(
    engine: deepspeed.DeepSpeedEngine, optimizer: torch.optim.Optimizer
) -> dict[Tensor, list[SharedWeight]]:
    """Return the weights in each tensor that an optimizer steps.

    Args:
        engine: built, with its weights divided.
        optimizer: the one that steps them.
    """
    zero = engine.optimizer
    tensor = split.part_of(engine.module)
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _of_stage_3(zero, tensor)
    weights: dict[Tensor, list[SharedWeight]] = {}
    flat = flat_groups(zero)
    for flat_group in flat:
        stepped = flat_group.copy()
        first = torch.distributed.get_rank(flat_group.process_group) * stepped.numel()
        members = []
        for weight, shape, offset in flat_group.members:
            begin = max(offset, first)
            end = min(offset + shape.numel(), first + stepped.numel())
            share = Share(0, 0, 0)
            if begin < end:
                share = Share(begin - offset, begin - first, end - begin)
            members.append(_shared(weight, shape, share, flat_group.process_group, tensor))
        weights[stepped] = members
    if flat:
        return weights
    # ZeRO 0; in half precision the optimizer steps fp32 copies.
    for members_of_group, group in zip(stepped_groups(zero), optimizer.param_groups, strict=True):
        for weight, stepped in zip(members_of_group, group["params"], strict=True):
            share = Share(0, 0, weight.numel())
            weights[stepped] = [_shared(weight, weight.shape, share, None, tensor)]
    return weights


def _of_stage_3(zero: Any, tensor: split.TensorPart | None) -> dict[Tensor, list[SharedWeight]]:
    """Return the weights in each sub-group of stage 3."""
    weights: dict[Tensor, list[SharedWeight]] = {}
    for number, stepped in enumerate(zero.fp32_partitioned_groups_flat):
        members = []
        offset = 0
        for weight in zero.fp16_groups[number]:
            size = weight.partition_numel()
            group = weight.ds_process_group
            start = torch.distributed.get_rank(group) * size
            num = max(0, min(size, weight.ds_numel - start))
            share = Share(start if num else 0, offset, num)
            members.append(_shared(weight, weight.ds_shape, share, group, tensor))
            offset += size
        weights[stepped] = members
    return weights


def _shared(
    weight: Tensor,
    shape: torch.Size,
    share: Share,
    replicas: Any,
    tensor: split.TensorPart | None,
) -> SharedWeight:
    """Return a weight with the groups of ranks that hold the rest of it. `replicas` are those that
    have shares of this rank's part.
    """
    sharing = []
    if replicas is not None and torch.distributed.get_world_size(replicas) > 1:
        sharing.append(replicas)
    others = []
    part = None
    if tensor is not None:
        part = part_of(weight, tensor_rank=tensor.rank, tensor_size=tensor.size)
        if split_of(weight) is not None:
            others.append(tensor.group)
    experts = expert_part_of(weight)
    if experts is not None:
        part = part or experts
        others.append(group_of_part(experts))
    return SharedWeight(weight, torch.Size(shape), share, part, tuple(sharing), tuple(others))


def totals_over_ranks(
    sums: Sequence[Tensor], groups_of: Sequence[tuple[Any, ...]], device: torch.device
) -> list[Tensor]:
    """Return sums, added up over the ranks that hold the rest of their weights. Collective.

    Args:
        sums: of each weight some, flat; of equal sizes on all ranks.
        groups_of: process groups of each weight.
        device: where they are sent; a share may lie on the host.
    """
    totals = list(sums)
    members: dict[tuple[Any, ...], list[int]] = {}
    for number, groups in enumerate(groups_of):
        members.setdefault(groups, []).append(number)
    for groups, numbers in members.items():
        if not groups:
            continue
        own = torch.cat([sums[number] for number in numbers])
        total = own.to(device)
        for process_group in groups:
            torch.distributed.all_reduce(total, group=process_group)
        sizes = [sums[number].numel() for number in numbers]
        parts = torch.split(total.to(own.device), sizes)
        for number, part in zip(numbers, parts, strict=True):
            totals[number] = part
    return totals
