"""Parts that a rank has of divided weights, as the attributes of the weights show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from framework.checkpoint.state.tensor_split import RankPart, Split

EXPERT_PART: Final = "expert_part"
"""Attribute of a weight that holds some of a layer's experts: its `RankPart` in their group."""


def expert_part_of(weight: torch.Tensor) -> RankPart | None:
    """Return the part that a weight is of all experts of its layer, or None if it has them all."""
    return vars(weight).get(EXPERT_PART)


def split_of(weight: torch.Tensor) -> Split | None:
    """Return the split of a weight in a tensor group, its instance attribute `split`, or None; the
    class attribute of that name is torch's method.
    """
    return vars(weight).get("split")


def splits_of(names: Mapping[torch.Tensor, str]) -> dict[str, Split]:
    """Return the splits of the tensors that have one, by name."""
    splits = {}
    for tensor, name in names.items():
        split = split_of(tensor)
        if split is not None:
            splits[name] = split
    return splits


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight before a tensor group (its attribute `split`), an expert group
    and ZeRO-3 took their parts.
    """
    shape = torch.Size(getattr(weight, "ds_shape", weight.shape))
    split = split_of(weight)
    part = expert_part_of(weight)
    if split is not None:
        return split.whole_shape(shape)
    if part is not None:
        return part.split.whole_shape(shape)
    return shape
