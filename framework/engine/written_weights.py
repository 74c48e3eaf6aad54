"""Weights that the user's own code writes (callbacks, `forward`, a loop of one's own, torch
itself): kept, or refused.

DeepSpeed steps a copy of the weights in fp32 and writes it over the module (ZeRO 1 and 2, half
precision at 0), or has no whole weights between two uses (3). So a write into the module lasts
until the next step, or has no place at all. Here what the module holds is carried into the copy:
before each step, and before the copy is read.

- ZeRO 1 and 2, half precision at 0: this rank's share of the module is compared with the copy,
  rounded as DeepSpeed rounds it (runtime/zero/stage_1_and_2.py `step`). Where they differ, the
  module's number is taken.
- ZeRO 3: what a gathered weight holds is written back when it is released
  (runtime/zero/partition_parameters.py `_partition_param` drops it). A weight that is not gathered
  is refused by its name at the line that writes into it.
- A copy that lies on another device costs a transfer: there a sum over the share shows that it was
  written.

Nothing waits for the device between logged points.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from traceback import walk_tb
from types import MethodType
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.tensor_fragment import set_full_hp_param
from torch import Tensor
from torch.nn import Parameter

from framework.checkpoint.state.optimizer_shards import Names, opened
from framework.engine.distributed import gather
from framework.errors import TrainingError

# Numbers that are compared at once, which takes 11 to 17 bytes each meanwhile: few where they lie
# in a cache, more where every piece is some kernels to launch.
_AT_ONCE_ON_CPU: Final = 2**17
_AT_ONCE: Final = 2**22
_MOST_BLOCKS: Final = 2**11  # sums of a flat buffer, by which a weight is found
# Torch leaves these before it looks at memory, where a tensor has no elements
# (aten/src/ATen/native/Distributions.cpp), and on GPUs those for lists of tensors
# (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_DRAWS: Final = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)
_UNREACHABLE: Final = "Cannot access data pointer of Tensor"  # c10/core/StorageImpl.h
_LOADED: Final = re.compile(
    r"size mismatch for (\S+): [^\n]*the shape in current model is torch\.Size\(\[0\]\)"
)
_spread: Final[dict[int, str]] = {}  # storages that stand for spread weights -> their names


Pairs = list[tuple[Tensor, Tensor]]
"""Weights of the module and what is stepped for them."""


class WrittenWeights:
    """Keeps what is written into the weights of one engine, or refuses it."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, names: Callable[[], Names], *, log_every: int
    ) -> None:
        """Look from the engine's next step on; `names` are the plain names of its weights."""
        self._engine = engine
        self._optimizer = engine.optimizer
        self._names = names
        self._log_every = log_every
        self._began = self._since = engine.global_steps
        self._groups = _flat_groups(self._optimizer)
        # of what all ranks of a group should have alike
        self._sums: list[Tensor | None] = [None] * len(self._groups)
        # sums after a step of shares whose copy lies elsewhere
        self._shares: dict[int, Tensor] = {}
        self._written: dict[int, Tensor] = {}  # 1 where such a share was written
        self._places: list[int] = []
        self._same: Pairs = []
        self._others: list[Pairs] = []
        self._spread: _SpreadWeights | None = None
        if hasattr(self._optimizer, "fp32_partitioned_groups_flat"):
            self._spread = _SpreadWeights(engine, names())
        self._keep_what_deepspeed_sets()
        if self._spread is not None or self._groups or _is_half(self._optimizer):
            step = self._optimizer.step
            self._optimizer.step = functools.wraps(step)(functools.partial(self._step, step))
        self.reset()

    def reset(self) -> None:
        """Begin anew, from weights that came from a checkpoint."""
        self._shares = {
            number: _sums(low)
            for number, (low, copy) in enumerate(self._pairs())
            if _is_apart(low, copy)
        }
        self._forget()
        self._began = self._engine.global_steps
        if self._spread is not None:
            self._spread.looks = True

    def carry(self) -> None:
        """Carry what was written into the copies, before they are read. Collective at stage 3."""
        spread = self._spread
        looks = spread is not None and spread.looks
        if spread is not None:
            spread.looks = True
        with opened(self._optimizer), torch.no_grad():
            self._carry()
            self._note_before()
        if spread is not None:
            spread.looks = looks

    @contextmanager
    def gathered(self, module: torch.nn.Module | None = None) -> Iterator[torch.nn.Module]:
        """Within it the weights of the model, or of one of its modules, are whole, and what every
        rank alike writes into them is kept. Collective.
        """
        module = module or self._engine.module
        if self._spread is None:
            yield module
        else:
            with self._spread.gathered(module.parameters()):
                yield module

    def refuse(self) -> None:
        """Refuse what was written since the last look and is lost, or differs between ranks.
        Collective; waits for the device.

        Raises:
            TrainingError: kind ``weight-written`` or ``weight-differs-between-ranks``.
        """
        lost, differing = self._found()
        when = self._when()
        self._forget()
        if lost:
            reason = (
                "was written by code of the run, and the optimizer's copy of it lies on "
                "another device"
            )
            raise self._refusal(
                lost, reason, "leave out zero.offload_optimizer and zero.offload_param", when=when
            )
        if differing:
            raise TrainingError(
                f"{when}: weight {_listed(differing)} was written, and not alike on all ranks: of "
                "each number one rank's value would be kept; draw from a generator with one seed "
                "on all ranks, or from what all ranks have alike [weight-differs-between-ranks]"
            )

    def unguarded(self) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed may save and load spread weights as the empty tensors
        that they are.
        """
        return _unguarded(self._spread)

    def close(self) -> None:
        """Let go of the engine's weights."""
        if self._spread is not None:
            self._spread.close()

    def _step(self, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with torch.no_grad():
            if self._spread is not None:
                self._optimizer._partition_all_parameters()  # as its `step` begins
            self._carry()
            self._note_before()
        result = step(*arguments, **named)
        with torch.no_grad():
            for number, (low, _) in enumerate(self._pairs() if self._shares else ()):
                if number in self._shares:
                    self._shares[number] = _sums(low)
        if self._spread is not None:
            following = self._engine.global_steps + 2  # DeepSpeed counts this one when it is over
            self._spread.looks = following % self._log_every == 0 or following <= self._began + 2
        return result

    def _carry(self) -> None:
        for group in self._groups:
            self._put_back(group)
        same, others = self._views()
        if same:
            torch._foreach_copy_([copy for _, copy in same], [low for low, _ in same])
        for some in others:
            _take_over(some)

    def _views(self) -> tuple[Pairs, list[Pairs]]:
        """List the pairs of one type, and batches of the others: as before, while all lie where
        they lay.
        """
        places = [one.data_ptr() for one in self._compared()]
        if places != self._places:
            near = [
                (low, copy)
                for low, copy in self._pairs()
                if not (_is_apart(low, copy) or _is_same(low, copy))
            ]
            self._same = [(low, copy) for low, copy in near if low.dtype == copy.dtype]
            self._others = list(
                _batches([(low, copy) for low, copy in near if low.dtype != copy.dtype])
            )
            self._places = places
        return self._same, self._others

    def _compared(self) -> Iterator[Tensor]:
        optimizer = self._optimizer
        if not _is_half(optimizer):
            return chain(*self._pairs())
        copies = getattr(optimizer, "fp32_groups", None) or [optimizer.fp32_groups_flat]
        return chain(*optimizer.fp16_groups, *copies)

    def _put_back(self, group: _FlatGroup) -> None:
        """Put what was bound to a weight (`weight.data = ...`) where DeepSpeed keeps it."""
        flat = group.flat()
        first = flat.data_ptr()
        size = flat.element_size()
        for parameter, shape, offset in group.members:
            if parameter.data_ptr() == first + offset * size or not shape.numel():
                continue
            if parameter.shape != shape:
                reason = f"has another shape, {tuple(parameter.shape)} instead of {tuple(shape)}"
                raise self._refusal(self._named([parameter]), reason, "keep the shapes of weights")
            place = flat.narrow(0, offset, shape.numel()).view(shape)
            place.copy_(parameter.data)
            parameter.data = place

    def _note_before(self) -> None:
        """Add up what all ranks should have alike, and note shares that were written since the last
        step.
        """
        for number, group in enumerate(self._groups):
            if group.ranks > 1:
                found = _sums(group.flat())
                before = self._sums[number]
                self._sums[number] = found if before is None else before.add_(found)
        for number, (low, _) in enumerate(self._pairs() if self._shares else ()):
            if number in self._shares:
                changed = _sums(low) != self._shares[number]
                before = self._written.get(number)
                self._written[number] = changed if before is None else before | changed

    def _found(self) -> tuple[list[str], list[str]]:
        """Name the weights that were written and are lost, and those that differ between ranks, on
        all ranks.
        """
        lost = list[str]()
        differing = list[str]()
        is_open = False  # alike on all ranks
        if self._spread is not None and self._spread.has_news:
            is_open = True
            lost, differing = self._spread.found()
        for number, changed in self._written.items():
            is_open = True
            lost += self._named(self._in_share(number, changed))
        for group, sums in zip(self._groups, self._sums, strict=True):
            if sums is not None:
                is_open = True
                differing += self._named(
                    group.members_in(_differing(sums, group.process_group), group.flat())
                )
        if not is_open or torch.distributed.get_world_size() == 1:
            return lost, differing
        found = torch.tensor(len(lost) + len(differing), device=self._engine.device)
        torch.distributed.all_reduce(found)
        if not found:
            return [], []
        everyone = gather((lost, differing))
        lost = [name for of_rank, _ in everyone for name in of_rank]
        return list(dict.fromkeys(lost)), list(
            dict.fromkeys(name for _, of_rank in everyone for name in of_rank)
        )

    def _in_share(self, number: int, changed: Tensor) -> list[Parameter]:
        blocks: list[int] = changed.nonzero().flatten().tolist()
        low, _ = self._pairs()[number]
        if self._groups:
            group = self._groups[number]
            first = torch.distributed.get_rank(group.process_group) * low.numel()
            return group.members_in(blocks, low, first=first)
        members = list[tuple[Parameter, int, int]]()
        offset = 0
        for weight in self._optimizer.fp16_groups[number]:
            members.append((weight, weight.partition_numel(), offset))
            offset += weight.partition_numel()
        return _members_in(members, blocks, low)

    def _forget(self) -> None:
        self._sums = [None] * len(self._groups)
        self._written.clear()
        self._since = self._engine.global_steps
        if self._spread is not None:
            self._spread.forget()

    def _named(self, weights: Sequence[Parameter]) -> list[str]:
        if weights:
            names = self._names()
        else:
            names = {}
        return [names.get(weight, "?") for weight in weights]

    def _refusal(
        self, names: Sequence[str], reason: str, fix: str, *, when: str = ""
    ) -> TrainingError:
        return TrainingError(
            f"{when or self._when()}: weight {_listed(names)} {reason}; {fix} [weight-written]"
        )

    def _when(self) -> str:
        first = self._since + 1
        last = max(self._engine.global_steps, self._since + 1)
        if first >= last:
            return f"step {last}"
        return f"steps {first} to {last}"

    def _pairs(self) -> Pairs:
        """This rank's shares of the module, and the copies that are stepped for them."""
        optimizer = self._optimizer
        if self._spread is not None:
            lows = optimizer.fp16_partitioned_groups_flat
            copies = optimizer.fp32_partitioned_groups_flat
            nothing = torch.empty(0)  # where a share lies in a file
            pairs = zip(lows, copies, strict=True)
            return [
                (nothing, nothing) if low is None else (low.data, copy.data) for low, copy in pairs
            ]
        if self._groups:
            return [(group.share(), group.copy().data) for group in self._groups]
        if isinstance(optimizer, FP16_Optimizer):
            found = Pairs()
            for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                pieces = flat.data.split([one.numel() for one in group])
                found += [
                    (one.data, piece.view_as(one)) for one, piece in zip(group, pieces, strict=True)
                ]
            return found
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            return [
                (low.data, copy.data)
                for lows, copies in groups
                for low, copy in zip(lows, copies, strict=True)
            ]
        return []

    def _keep_what_deepspeed_sets(self) -> None:
        """DeepSpeed's own functions for this (utils/tensor_fragment.py `safe_set_full_fp32_param`)
        write the copy alone, and leave the module as it was: it gets the value as well.
        """
        if self._spread is not None:
            self._spread.keep_what_deepspeed_sets()
        for group in self._groups:
            for parameter, _, _ in group.members:
                if hasattr(parameter, "set_full_hp_param"):
                    parameter.set_full_hp_param = MethodType(_set_both, parameter)


class _FlatGroup:
    """A group of weights that lie in one row, cut into equal shares (ZeRO 1 and 2, bf16
    pipelines).
    """

    def __init__(self, optimizer: Any, number: int, names: tuple[str, str, str, str]) -> None:
        groups, self._flats, self._parts, self._copies = names
        self._optimizer = optimizer
        self._number = number
        self.process_group = optimizer.real_dp_process_group[number]
        self.ranks = torch.distributed.get_world_size(self.process_group)
        self.members: list[tuple[Parameter, torch.Size, int]] = []
        offset = 0
        for parameter in getattr(optimizer, groups)[number]:
            self.members.append((parameter, parameter.shape, offset))
            offset += parameter.numel()

    def flat(self) -> Tensor:
        found: Tensor = getattr(self._optimizer, self._flats)[self._number]
        return found

    def share(self) -> Tensor:
        rank = torch.distributed.get_rank(self.process_group)
        found: Tensor = getattr(self._optimizer, self._parts)[self._number][rank]
        return found.data

    def copy(self) -> Tensor:
        found: Tensor = getattr(self._optimizer, self._copies)[self._number]
        return found

    def members_in(self, blocks: Sequence[int], part: Tensor, *, first: int = 0) -> list[Parameter]:
        """List the weights in blocks of a part that begins at `first`."""
        members = [
            (parameter, shape.numel(), offset - first) for parameter, shape, offset in self.members
        ]
        return _members_in(members, blocks, part)


def _members_in(
    members: Iterable[tuple[Parameter, int, int]], blocks: Sequence[int], part: Tensor
) -> list[Parameter]:
    """List those of the members (weight, numbers, place) that lie in blocks of a part, the fullest
    first.
    """
    count = _as_numbers(part).numel()
    size = _block_size(count) * part.numel() // max(count, 1)
    starts = torch.tensor(blocks, dtype=torch.int64) * size
    found = list[tuple[int, Parameter]]()
    for parameter, numel, offset in members:
        common = (starts + size).clamp(max=offset + numel) - starts.clamp(min=offset)
        total = int(common.clamp(min=0).sum())
        if total:
            found.append((total, parameter))
    return [parameter for _, parameter in sorted(found, key=lambda pair: -pair[0])]


def _flat_groups(optimizer: Any) -> list[_FlatGroup]:
    kinds = (
        (
            "round_robin_bit16_groups",
            "bit16_groups_flat",
            "parallel_partitioned_bit16_groups",
            "single_partition_of_fp32_groups",
        ),
        (
            "bf16_groups",
            "bf16_groups_flat",
            "bf16_partitioned_groups",
            "fp32_groups_flat_partition",
        ),
    )
    for names in kinds:
        if all(hasattr(optimizer, name) for name in names):
            return [
                _FlatGroup(optimizer, number, names)
                for number in range(len(getattr(optimizer, names[0])))
            ]
    return []


class _SpreadWeights:
    """The weights of ZeRO stage 3, which are whole between a gathering and a release only.

    Attributes:
        looks: whether what is released now is compared between ranks.
        has_news: whether anything was.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, names: Names) -> None:
        self._optimizer = engine.optimizer
        self._device = engine.device
        # or what is gathered is not what is kept
        self._is_exact = not engine.zero_quantized_weights()
        self._weights = [
            weight for weight in engine.module.parameters() if hasattr(weight, "ds_id")
        ]
        self._names = [names.get(weight, "?") for weight in self._weights]
        self._numbers = {weight: number for number, weight in enumerate(self._weights)}
        self._empties = [
            _guard(weight, name) for weight, name in zip(self._weights, self._names, strict=True)
        ]
        self._partitions = [weight.partition for weight in self._weights]
        self.looks = False
        self._is_guarded = True
        for weight, partition in zip(self._weights, self._partitions, strict=True):
            weight.partition = functools.partial(self._release, weight, partition)
            self._set_empty(weight)
        _watch_silent_writes()
        # as DeepSpeed does after each step: they are whole from the first one on
        self._gather_small()
        self.forget()

    def forget(self) -> None:
        least = torch.iinfo(torch.int32).min
        shape = len(self._weights), 2  # the largest sum and the negated least
        self._ends = torch.full(shape, least, dtype=torch.int32, device=self._device)
        self._lost = torch.zeros(len(self._weights), dtype=torch.bool, device=self._device)
        self.has_news = False

    def close(self) -> None:
        _unwatch_silent_writes()
        self.guard(False)
        for weight, partition in zip(self._weights, self._partitions, strict=True):
            weight.partition = partition

    @contextmanager
    def gathered(self, weights: Iterable[Parameter]) -> Iterator[None]:
        own = [weight for weight in weights if weight in self._numbers]
        before = self.looks
        with deepspeed.zero.GatheredParameters(own, enabled=bool(own)):
            yield
            self.looks = True
        self.looks = before
        self._gather_small()

    def found(self) -> tuple[list[str], list[str]]:
        """Name what was lost on this rank, and what differs between ranks. Collective."""
        lost = [self._names[number] for number in self._lost.nonzero().flatten().tolist()]
        differing = _differing(self._ends.flatten(), self._optimizer.dp_process_group)
        return lost, [self._names[number // 2] for number in differing]

    def keep_what_deepspeed_sets(self) -> None:
        optimizer = self._optimizer
        set_full = optimizer.set_full_hp_param
        set_local = optimizer.set_local_hp_param

        def set_full_both(value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
            set_full(value, param, optim_state_key)
            if optim_state_key is None and param.requires_grad:
                start, own = _place(param)
                self._put(param, value.flatten()[start : start + own])
                if param.ds_status is ZeroParamStatus.AVAILABLE:
                    param.data.copy_(value.view_as(param))

        def set_local_both(value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
            set_local(value, param, optim_state_key)
            if optim_state_key is None and param.requires_grad:
                start, own = _place(param)
                self._put(param, value.flatten()[:own])
                if param.ds_status is ZeroParamStatus.AVAILABLE:
                    param.data.view(-1)[start : start + own].copy_(value.flatten()[:own])

        optimizer.set_full_hp_param = set_full_both
        optimizer.set_local_hp_param = set_local_both

    def _put(self, weight: Any, share: Tensor) -> None:
        with torch.no_grad():
            weight.ds_tensor.narrow(0, 0, share.numel()).copy_(share)

    def _release(
        self,
        weight: Any,
        partition: Callable[..., None],
        param_list: Sequence[Any] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Stand in for `partition` of a weight (`Init._convert_to_deepspeed_param`)."""
        weights = [weight] if param_list is None else param_list
        if not has_been_updated:
            with torch.no_grad():
                for each in weights:
                    if each.ds_status is ZeroParamStatus.AVAILABLE:
                        self._keep(each)
        partition(param_list, hierarchy, has_been_updated, free_data)
        for each in weights if free_data else ():
            self._set_empty(each)

    def _keep(self, weight: Any) -> None:
        kept = weight.ds_tensor
        whole = weight.data
        is_exact = self._is_exact and not hasattr(kept, "ds_quant_scale")
        if not is_exact or whole.numel() != weight.ds_numel or kept.numel() != kept.ds_numel:
            return
        start, own = _place(weight)
        number = self._numbers.get(weight)
        share = whole.reshape(-1).narrow(0, start, own)
        is_apart = kept.device != whole.device or weight.ds_secondary_tensor is not None
        if not is_apart and own:
            kept.narrow(0, 0, own).copy_(share)
        if not self.looks or number is None:
            return
        self.has_news = True
        if is_apart and own:
            self._lost[number] |= (
                (share.to(kept.device) != kept.narrow(0, 0, own)).any().to(self._device)
            )
        value = _total(whole.reshape(-1))
        ends = torch.stack((value, -value))
        self._ends[number] = torch.maximum(self._ends[number], ends)

    def _set_empty(self, weight: Any) -> None:
        number = self._numbers.get(weight)
        if (
            number is not None
            and self._is_guarded
            and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        ):
            weight.data = self._empties[number]

    def guard(self, is_guarded: bool) -> None:
        """Have spread weights raise where they are written or read by their address, or be plain
        empty tensors.
        """
        self._is_guarded = is_guarded
        for weight in self._weights:
            self._set_empty(weight)
            if not is_guarded and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)

    def _gather_small(self) -> None:
        small = self._optimizer.persistent_parameters
        if small:
            small[0].all_gather(small)


def _guard(weight: Any, name: str) -> Tensor:
    """Make the empty tensor that stands for a spread weight: torch raises where it is written."""
    empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
    storage = empty.untyped_storage()
    torch._C._set_throw_on_mutable_data_ptr(empty)
    _spread[storage._cdata] = name
    # an error is explained when the engine is closed
    weakref.finalize(empty, _spread.pop, storage._cdata, None)
    return empty


@contextmanager
def _unguarded(spread: _SpreadWeights | None) -> Iterator[None]:
    if spread is None:
        yield
        return
    spread.guard(False)
    try:
        yield
    finally:
        spread.guard(True)


# what is replaced: its owner, its name and what it is
_silent: Final[list[tuple[Any, str, Any]]] = []
_num_watching = 0


def _watch_silent_writes() -> None:
    """Have writes into a spread weight of which torch returns without a word raise as others do."""
    global _num_watching
    _num_watching += 1
    if _num_watching > 1:
        return
    lists = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
    for owner, names in ((torch.Tensor, _DRAWS), (torch, lists)):
        for name in names:
            write = getattr(owner, name)
            _silent.append((owner, name, write))
            setattr(owner, name, _refusing_spread(write))


def _refusing_spread(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def written(target: Any, *arguments: Any, **named: Any) -> Any:
        if _spread_names(target):
            raise RuntimeError(_UNREACHABLE)
        return write(target, *arguments, **named)

    return written


def _unwatch_silent_writes() -> None:
    global _num_watching
    _num_watching -= 1
    while not _num_watching and _silent:
        owner, name, write = _silent.pop()
        if owner is torch.Tensor:
            delattr(owner, name)  # its base class has it
        else:
            setattr(owner, name, write)


def written_while_spread(error: BaseException, *, place: str = "") -> str:
    """Explain an error of code that writes into a weight which stage 3 has spread; empty for other
    errors. `place` is where it does.
    """
    stated = str(error)
    loaded = _LOADED.search(stated)
    if not isinstance(error, RuntimeError) or not _spread or not (loaded or _UNREACHABLE in stated):
        return ""
    names = list[str]()
    if loaded:
        names.append(loaded[1])
    for frame, _ in walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            names += _spread_names(value)
    unique = list(dict.fromkeys(names))
    if unique:
        weight = f"weight {' or '.join(unique[:2])}"
    else:
        weight = "a weight"
    return (
        f"{weight} is written, or read by its address,{place} while ZeRO stage 3 has spread it "
        "over the ranks; do it within state.gathered() of a callback or engine.gathered() of a "
        "loop of your own, keep what forward moves in a buffer, or set zero.stage: 2 "
        "[weight-written]"
    )


def _spread_names(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        values = value
    else:
        values = (value,)
    tensors = [one for one in values if isinstance(one, Tensor) and not one.numel()]
    found = [
        _spread.get(one.untyped_storage()._cdata) for one in tensors if one.layout is torch.strided
    ]
    return [name for name in found if name]


def _place(weight: Any) -> tuple[int, int]:
    """Return where this rank's share of a weight begins, and how many numbers of it are no
    padding.
    """
    size = weight.ds_tensor.ds_numel
    start = size * torch.distributed.get_rank(weight.ds_process_group)
    own = max(min(size, weight.ds_numel - start), 0)
    return (start, own) if own else (0, 0)


def _set_both(weight: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    """Stand in for `set_full_hp_param` of a weight."""
    set_full_hp_param(weight, value, optim_state_key)
    if optim_state_key is None:
        with torch.no_grad():
            weight.data.copy_(value.view_as(weight))


def _is_half(optimizer: Any) -> bool:
    return isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer))


def _is_apart(low: Tensor, copy: Tensor) -> bool:
    """Check whether a copy lies on another device, or in a file."""
    return low.device != copy.device or low.numel() != copy.numel()


def _is_same(low: Tensor, copy: Tensor) -> bool:
    return low.data_ptr() == copy.data_ptr()


def _batches(pairs: Pairs) -> Iterator[Pairs]:
    """Cut pairs into lists of as many numbers as may be compared at once."""
    batch: Pairs = []
    total = 0
    for low, copy in pairs:
        if not (low.is_contiguous() and copy.is_contiguous()):
            yield [(low, copy)]
            continue
        most = _AT_ONCE_ON_CPU if low.device.type == "cpu" else _AT_ONCE
        lows, copies = (torch.split(one.view(-1), most) for one in (low, copy))
        pieces = zip(lows, copies, strict=True)
        for piece in pieces:
            if batch and total + piece[0].numel() > most:
                yield batch
                batch = []
                total = 0
            batch.append(piece)
            total += piece[0].numel()
    if batch:
        yield batch


def _take_over(pairs: Pairs) -> None:
    """Take the numbers that are not the copy's rounded ones; the others keep the bits that rounding
    drops.
    """
    lows = [low for low, _ in pairs]
    copies = [copy for _, copy in pairs]
    low = _joined(lows)
    copy = _joined(copies)
    taken = torch.where(copy.to(low.dtype) == low, copy, low.to(copy.dtype))
    pieces = [taken] if len(pairs) == 1 else torch.split(taken, [one.numel() for one in copies])
    torch._foreach_copy_(copies, list(pieces))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([one.view(-1) for one in tensors])


def _as_numbers(flat: Tensor) -> Tensor:
    """See the bits of a tensor as whole numbers, of which a sum is alike in any order, also where
    it overflows.
    """
    size = flat.element_size()
    if size == 8 or (size == 2 and flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0):
        return flat.view(torch.int32)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])


def _total(flat: Tensor) -> Tensor:
    return _as_numbers(flat.contiguous()).sum(dtype=torch.int32)


def _block_size(count: int) -> int:
    return max(1, -(-count // _MOST_BLOCKS))


def _sums(flat: Tensor) -> Tensor:
    """Sums of the bits in each block of a row."""
    numbers = _as_numbers(flat.detach())
    size = _block_size(numbers.numel())
    whole = numbers.numel() // size
    sums = numbers[: whole * size].view(whole, size).sum(1, dtype=torch.int32)
    if whole * size == numbers.numel():
        return sums
    return torch.cat((sums, numbers[whole * size :].sum(dtype=torch.int32).view(1)))


def _differing(sums: Tensor, process_group: Any) -> list[int]:
    """List the places at which ranks have other sums. Collective; waits for the device."""
    ends = torch.stack((sums, -sums))
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX, group=process_group)
    found: list[int] = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    return found


def _listed(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
