"""Groups of weights that DeepSpeed lays out in one flat tensor (ZeRO 1 and 2, bf16 pipelines)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.nn import Parameter

from framework.engine.weight_sums import weights_in_blocks


class _Attributes(NamedTuple):
    """Attributes of an optimizer that hold something of each group."""

    weights: str
    flat: str
    shares: str  # of every rank, views of `flat`
    copy: str  # of this rank's share, in fp32


_KINDS: Final = (
    _Attributes(
        weights="round_robin_bit16_groups",
        flat="bit16_groups_flat",
        shares="parallel_partitioned_bit16_groups",
        copy="single_partition_of_fp32_groups",
    ),
    _Attributes(
        weights="bf16_groups",
        flat="bf16_groups_flat",
        shares="bf16_partitioned_groups",
        copy="fp32_groups_flat_partition",
    ),
)


class FlatGroup:
    """A group of weights that lie in one flat tensor, cut into equal shares.

    Attributes:
        process_group: the ranks that have the shares.
        ranks: how many they are.
        members: weight, shape and offset in the flat tensor.
    """

    def __init__(self, optimizer: Any, number: int, attributes: _Attributes) -> None:
        self._optimizer = optimizer
        self._number = number
        self._attributes = attributes
        self.process_group = optimizer.real_dp_process_group[number]
        self.ranks = torch.distributed.get_world_size(self.process_group)
        self.members: list[tuple[Parameter, torch.Size, int]] = []
        offset = 0
        for parameter in getattr(optimizer, attributes.weights)[number]:
            self.members.append((parameter, parameter.shape, offset))
            offset += parameter.numel()

    def flat(self) -> Tensor:
        flat: Tensor = getattr(self._optimizer, self._attributes.flat)[self._number]
        return flat

    def place_of(self, shape: torch.Size, offset: int) -> Tensor:
        """Return the view of the flat tensor, from `offset` on, that is a weight of this shape."""
        if getattr(self._optimizer, "zenflow", False):
            from framework.engine.zenflow import place_in

            return place_in(self.flat(), shape, offset)
        return self.flat().narrow(0, offset, shape.numel()).view(shape)

    def share(self) -> Tensor:
        """Return this rank's share of the flat tensor."""
        rank = torch.distributed.get_rank(self.process_group)
        share: Tensor = getattr(self._optimizer, self._attributes.shares)[self._number][rank]
        return share.data

    def copy(self) -> Tensor:
        """Return the fp32 copy of this rank's share, which is stepped."""
        copy: Tensor = getattr(self._optimizer, self._attributes.copy)[self._number]
        return copy

    def members_in(self, blocks: Sequence[int], part: Tensor, *, first: int = 0) -> list[Parameter]:
        """List the weights in blocks of a part that begins at element `first` of the flat tensor.
        Blocks are positions in the result of `block_sums`.
        """
        members = [
            (parameter, shape.numel(), offset - first) for parameter, shape, offset in self.members
        ]
        return weights_in_blocks(members, blocks, part)


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    """List the flat groups of an optimizer; empty for an optimizer without them."""
    for attributes in _KINDS:
        if all(hasattr(optimizer, name) for name in attributes):
            num_groups = len(getattr(optimizer, attributes.weights))
            return [FlatGroup(optimizer, number, attributes) for number in range(num_groups)]
    return []
