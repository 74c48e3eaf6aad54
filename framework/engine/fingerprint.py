"""A fingerprint of the frozen weights under adapters, which checkpoints do not hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed
from torch import nn

from framework.checkpoint.state import tensor_split
from framework.checkpoint.state.tensor_split import RankPart
from framework.checkpoint.state.weight_parts import expert_part_of, split_of
from framework.config.groups import base_name
from framework.engine.distributed import gather
from framework.models.experts import MixtureOfExperts
from framework.models.split import TensorPart, part_of

_CHUNK: Final = 1 << 22
_WHOLE: Final = "whole_in_fingerprint"
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers that mix well (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators"),
# as int64.
_PLACE: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX: Final = 0xBF58476D1CE4E5B9 - (1 << 64)


def fingerprint(
    model: nn.Module,
    gathered: Callable[[list[nn.Parameter]], AbstractContextManager[Any]],
    *,
    plain_name: Callable[[str], str] = str,
    is_stage: bool = False,
) -> tuple[str, str]:
    """Return a SHA-256 over names, shapes, types and numbers of all frozen weights, each by its
    first name; and the same over all names of weights that are tied, as manifests of earlier
    releases have it. Collective where a tensor group divides them, or `model` is a pipeline's stage
    (`is_stage`), which names weights otherwise than the plain model (`plain_name`).

    The first is the same at every ZeRO stage, for every size of tensor groups, and in stages, which
    have a tied weight under one name. `gathered` is a context
    in which partitioned weights are whole; it is entered module by module. A weight's numbers enter
    the hash as `_checksum`, on the weight's device: a hash of the bytes would take a second for
    each GB. Experts on other ranks count as they are there.
    """
    lines: list[str] = []
    further: list[str] = []
    seen: set[int] = set()
    part = part_of(model)
    for module_name, module in model.named_modules():
        frozen = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad
        }
        with gathered(list(frozen.values())):
            for name, parameter in frozen.items():
                full_name = plain_name(f"{module_name}.{name}" if module_name else name)
                shape, checksum = _shape_and_checksum(part, parameter)
                line = f"{base_name(full_name)} {shape} {parameter.dtype} {checksum}"
                if id(parameter) in seen:
                    further.append(line)
                else:
                    lines.append(line)
                seen.add(id(parameter))
    modules = list(model.modules())
    has_other_experts = any(isinstance(one, MixtureOfExperts) and one.group for one in modules)
    if is_stage or has_other_experts:
        lines = list(set(chain.from_iterable(gather(lines))))
    return _digest(lines), _digest([*lines, *further])


def _shape_and_checksum(
    part: TensorPart | None, parameter: nn.Parameter
) -> tuple[tuple[int, ...], int]:
    """Return shape and checksum of a whole weight; collective where a tensor group divides it."""
    if _WHOLE in vars(parameter):
        shape, checksum = vars(parameter)[_WHOLE]
        return shape, checksum
    shape = tuple(parameter.shape)
    own = _part_in(part, parameter)
    if own is None:
        return shape, int(_checksum(parameter.detach()))
    shape = tuple(own.split.whole_shape(shape))
    return shape, _checksum_of_parts(parameter.detach(), own, _groups_of(part, parameter))


def _part_in(part: TensorPart | None, weight: torch.Tensor) -> RankPart | None:
    """Return this rank's part of a weight of a model that a tensor group may divide."""
    if part is None:
        return expert_part_of(weight)
    return tensor_split.part_of(weight, tensor_rank=part.rank, tensor_size=part.size)


def _groups_of(part: TensorPart | None, weight: torch.Tensor) -> list[Any]:
    """Return the groups of ranks that have the parts of a weight."""
    groups: list[Any] = []
    if part is not None and split_of(weight) is not None:
        groups.append(part.group)
    experts = expert_part_of(weight)
    if experts is not None:
        from framework.engine.expert_parallel import group_of_part

        groups.append(group_of_part(experts))
    return groups


def note_whole(weight: nn.Parameter, whole: torch.Tensor) -> None:
    """Have a frozen weight, a part of `whole` that no `Split` describes, count as the whole."""
    vars(weight)[_WHOLE] = (tuple(whole.shape), int(_checksum(whole)))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _checksum(
    tensor: torch.Tensor, place_of: Callable[[torch.Tensor], torch.Tensor] = lambda number: number
) -> torch.Tensor:
    """Sum up the numbers' bits in 64 bits, each mixed with the number's place: `place_of` its
    number in the tensor, both int64.
    """
    flat = tensor.contiguous().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].view(_BITS[flat.element_size()]).to(torch.int64)
        numbers = torch.arange(start, start + len(bits), device=bits.device)
        mixed = bits + place_of(numbers) * _PLACE
        mixed = (mixed ^ (mixed >> 30)) * _MIX
        total += (mixed ^ (mixed >> 27)).sum()
    return total


def _checksum_of_parts(tensor: torch.Tensor, part: RankPart, groups: Sequence[Any]) -> int:
    """Return the `_checksum` of a whole weight by the parts of the ranks of its groups.
    Collective.
    """
    split = part.split
    whole = split.whole_shape(tensor.shape)
    row = whole[split.dim :].numel()
    inner = whole[split.dim + 1 :].numel()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    done = 0
    for begin, end in split.bounds(part.rank, part.size):
        width = (end - begin) * inner

        def place_of(
            number: torch.Tensor, width: int = width, first: int = begin * inner
        ) -> torch.Tensor:
            return number // width * row + first + number % width

        total += _checksum(tensor.narrow(split.dim, done, end - begin), place_of)
        done += end - begin
    for group in groups:
        torch.distributed.all_reduce(total, group=group)
    return int(total)
