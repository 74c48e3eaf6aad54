"""Weights that the user's own code writes (callbacks, `forward`, a loop of one's own, torch
itself): kept, or refused.

DeepSpeed steps a copy of the weights in fp32 and writes it over the module (ZeRO 1 and 2, half
precision at 0), or has no whole weights between two uses (3). So a write into the module lasts
until the next step, or has no place at all. Here what the module holds is carried into the copy:
before each step, and before the copy is read.

- ZeRO 1 and 2, half precision at 0: this rank's share of the module is compared with the copy,
  rounded as DeepSpeed rounds it (runtime/zero/stage_1_and_2.py `step`). Where they differ, the
  module's number is taken.
- ZeRO 3: see `spread_weights.py`.
- A copy that lies on another device costs a transfer: there a sum over the share shows that it was
  written.

Nothing waits for the device between logged points.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils.tensor_fragment import set_full_hp_param
from torch import Tensor
from torch.nn import Parameter

from framework.checkpoint.state.weight_names import Names, opened
from framework.config.optimizer import COMPARED_AT_ONCE, COMPARED_ON_CPU
from framework.engine.distributed import gather
from framework.engine.flat_groups import FlatGroup, flat_groups
from framework.engine.weight_sums import block_sums, differing_positions, weights_in_blocks
from framework.errors import TrainingError

if TYPE_CHECKING:
    from framework.engine.spread_weights import SpreadWeights

Pairs = list[tuple[Tensor, Tensor]]
"""(low, copy): weights of the module, and the fp32 copy that the optimizer steps for them."""


class WrittenWeights:
    """Keeps what is written into the weights of one engine, or refuses it."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, names: Callable[[], Names], *, log_every: int
    ) -> None:
        """Watch from the engine's next step on; `names` returns the plain names of its weights."""
        self._engine = engine
        self._optimizer = engine.optimizer
        self._names = names
        self._log_every = log_every
        self._first_step = engine.global_steps
        self._last_look = engine.global_steps
        self._groups = flat_groups(self._optimizer)
        # By number of the group: sums of bits that all ranks of the group should have alike.
        self._group_sums: dict[int, Tensor] = {}
        # By number of the pair, for shares with the copy on another device or in a file: sums
        # after the last step, and in which blocks the share was written since the last look.
        self._share_sums: dict[int, Tensor] = {}
        self._written_blocks: dict[int, Tensor] = {}
        # The pairs to carry, and the addresses at which they were when they were sorted.
        self._addresses: list[int] = []
        self._same_type: Pairs = []
        self._other_types: list[Pairs] = []
        self._spread: SpreadWeights | None = None
        if hasattr(self._optimizer, "fp32_partitioned_groups_flat"):
            from framework.engine.spread_weights import SpreadWeights

            self._spread = SpreadWeights(engine, names())
        self._keep_what_deepspeed_sets()
        if self._spread is not None or self._groups or _is_half(self._optimizer):
            step = self._optimizer.step
            self._optimizer.step = functools.wraps(step)(functools.partial(self._step, step))
        self.reset()

    def reset(self) -> None:
        """Begin anew, from weights that came from a checkpoint."""
        self._share_sums = {}
        # ZenFlow writes columns of the module itself, at every micro-batch.
        writes_itself = getattr(self._optimizer, "zenflow", False)
        for number, (low, copy) in enumerate(self._pairs()):
            if _is_apart(low, copy) and not writes_itself:
                self._share_sums[number] = block_sums(low)
        self._forget()
        self._first_step = self._engine.global_steps
        if self._spread is not None:
            self._spread.compares = True

    def carry(self) -> None:
        """Carry what was written into the copies, before they are read. Collective at stage 3."""
        spread = self._spread
        compared_before = spread is not None and spread.compares
        if spread is not None:
            spread.compares = True
        with opened(self._optimizer), torch.no_grad():
            self._carry()
            self._sum_up()
        if spread is not None:
            spread.compares = compared_before

    @contextmanager
    def gathered(self, module: torch.nn.Module | None = None) -> Iterator[torch.nn.Module]:
        """Gather the weights of the model, or of one of its modules, for the time of the block.
        What every rank alike writes into them is kept. Collective.
        """
        module = module or self._engine.module
        if self._spread is None:
            yield module
        else:
            with self._spread.gathered(module.parameters()):
                yield module

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Let the block write weights together with their copies: what it writes is not lost, where
        a copy lies on another device or in a file.
        """
        self._note_written_shares()
        yield
        for number, low in self._shares_apart():
            self._share_sums[number] = block_sums(low)

    def refuse(self) -> None:
        """Refuse what was written since the last look and is lost, or differs between ranks.
        Collective; waits for the device.

        Raises:
            TrainingError: kind ``weight-written`` or ``weight-differs-between-ranks``.
        """
        lost, differing = self._lost_and_differing()
        when = self._steps_since_look()
        self._forget()
        if lost:
            reason = (
                "was written by code of the run, and the optimizer's copy of it lies on "
                "another device"
            )
            fix = "leave out zero.offload_optimizer and zero.offload_param"
            raise _refusal(when, lost, reason, fix)
        if differing:
            raise TrainingError(
                f"{when}: weight {_in_short(differing)} was written, and not alike on all ranks: "
                "of each number one rank's value would be kept; draw from a generator with one "
                "seed on all ranks, or from what all ranks have alike "
                "[weight-differs-between-ranks]"
            )

    def unguarded(self) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed may save and load spread weights as the empty tensors
        that they are.
        """
        if self._spread is None:
            return nullcontext()
        return self._spread.unguarded()

    def close(self) -> None:
        """Leave the weights as DeepSpeed has them."""
        if self._spread is not None:
            self._spread.close()

    def _step(self, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Stand in for the optimizer's `step`: carry before it, and sum up after it what the next
        look compares with.
        """
        with torch.no_grad():
            if self._spread is not None:
                self._optimizer._partition_all_parameters()  # as its `step` begins
            self._carry()
            self._sum_up()
        result = step(*arguments, **named)
        with torch.no_grad():
            for number, low in self._shares_apart():
                self._share_sums[number] = block_sums(low)
        if self._spread is not None:
            following = self._engine.global_steps + 2  # DeepSpeed counts this step when it is over
            is_logged = following % self._log_every == 0
            self._spread.compares = is_logged or following <= self._first_step + 2
        return result

    def _carry(self) -> None:
        """Write the module's numbers into the copies, where a copy rounds to another."""
        for group in self._groups:
            self._put_back(group)
        self._sort_pairs()
        if self._same_type:
            lows = [low for low, _ in self._same_type]
            copies = [copy for _, copy in self._same_type]
            torch._foreach_copy_(copies, lows)
        for pairs in self._other_types:
            _take_over(pairs)

    def _sort_pairs(self) -> None:
        """Sort the pairs by whether both tensors have one type, if any tensor has moved since the
        last time. Pairs of different types are cut into batches.
        """
        addresses = [tensor.data_ptr() for tensor in self._compared_tensors()]
        if addresses == self._addresses:
            return
        self._same_type = []
        other_types: Pairs = []
        for low, copy in self._pairs():
            if _is_apart(low, copy) or _is_same(low, copy):
                continue
            if low.dtype == copy.dtype:
                self._same_type.append((low, copy))
            else:
                other_types.append((low, copy))
        self._other_types = list(_batches(other_types))
        self._addresses = addresses

    def _compared_tensors(self) -> Iterable[Tensor]:
        """Return tensors that are at another address if any pair is."""
        optimizer = self._optimizer
        if not _is_half(optimizer):
            return chain.from_iterable(self._pairs())
        copies = getattr(optimizer, "fp32_groups", None) or [optimizer.fp32_groups_flat]
        return chain(chain.from_iterable(optimizer.fp16_groups), chain.from_iterable(copies))

    def _put_back(self, group: FlatGroup) -> None:
        """Put what was bound to a weight (`weight.data = ...`) where DeepSpeed keeps it."""
        flat = group.flat()
        first = flat.data_ptr()
        size = flat.element_size()
        for parameter, shape, offset in group.members:
            if parameter.data_ptr() == first + offset * size or not shape.numel():
                continue
            if parameter.shape != shape:
                names = self._names_of([parameter])
                reason = f"has another shape, {tuple(parameter.shape)} instead of {tuple(shape)}"
                fix = "keep the shapes of weights"
                raise _refusal(self._steps_since_look(), names, reason, fix)
            place = group.place_of(shape, offset)
            place.copy_(parameter.data)
            parameter.data = place

    def _sum_up(self) -> None:
        """Add up what all ranks should have alike, and note the shares that were written since the
        last step.
        """
        for number, group in enumerate(self._groups):
            if group.ranks > 1:
                sums = block_sums(group.flat())
                if number in self._group_sums:
                    self._group_sums[number].add_(sums)
                else:
                    self._group_sums[number] = sums
        self._note_written_shares()

    def _note_written_shares(self) -> None:
        """Note the blocks of shares that were written since their sums were taken."""
        for number, low in self._shares_apart():
            written = block_sums(low) != self._share_sums[number]
            if number in self._written_blocks:
                written = self._written_blocks[number] | written
            self._written_blocks[number] = written

    def _shares_apart(self) -> list[tuple[int, Tensor]]:
        """List number and share of the pairs with the copy on another device or in a file."""
        if not self._share_sums:
            return []
        pairs = self._pairs()
        return [(number, pairs[number][0]) for number in self._share_sums]

    def _lost_and_differing(self) -> tuple[list[str], list[str]]:
        """Return the names of weights with a lost write, and of weights that differ between ranks.
        All ranks return the same names. Collective; waits for the device.
        """
        lost = list[str]()
        differing = list[str]()
        has_compared = False  # alike on all ranks
        if self._spread is not None and self._spread.has_compared:
            has_compared = True
            lost, differing = self._spread.lost_and_differing()
        for number, written in self._written_blocks.items():
            has_compared = True
            blocks: list[int] = written.nonzero().flatten().tolist()
            lost += self._names_of(self._weights_in_share(number, blocks))
        for number, sums in self._group_sums.items():
            has_compared = True
            group = self._groups[number]
            blocks = differing_positions(sums, group.process_group)
            differing += self._names_of(group.members_in(blocks, group.flat()))
        if not has_compared or torch.distributed.get_world_size() == 1:
            return lost, differing
        count = torch.tensor(len(lost) + len(differing), device=self._engine.device)
        torch.distributed.all_reduce(count)
        if not count:
            return [], []
        all_lost: dict[str, None] = {}
        all_differing: dict[str, None] = {}
        for rank_lost, rank_differing in gather((lost, differing)):
            all_lost |= dict.fromkeys(rank_lost)
            all_differing |= dict.fromkeys(rank_differing)
        return list(all_lost), list(all_differing)

    def _weights_in_share(self, number: int, blocks: list[int]) -> list[Parameter]:
        """List the weights in blocks of this rank's share in a pair."""
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
        return weights_in_blocks(members, blocks, low)

    def _forget(self) -> None:
        self._group_sums = {}
        self._written_blocks.clear()
        self._last_look = self._engine.global_steps
        if self._spread is not None:
            self._spread.forget()

    def _names_of(self, weights: Sequence[Parameter]) -> list[str]:
        if not weights:
            return []
        names = self._names()
        return [names.get(weight, "?") for weight in weights]

    def _steps_since_look(self) -> str:
        first = self._last_look + 1
        last = max(self._engine.global_steps, first)
        if first == last:
            return f"step {last}"
        return f"steps {first} to {last}"

    def _pairs(self) -> Pairs:
        """Return this rank's shares of the module, and the copies that are stepped for them."""
        optimizer = self._optimizer
        if self._spread is not None:
            return _pairs_of_stage_3(optimizer)
        if self._groups:
            return [(group.share(), group.copy().data) for group in self._groups]
        if isinstance(optimizer, FP16_Optimizer):
            return _pairs_of_fused(optimizer)
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            lows = chain.from_iterable(optimizer.fp16_groups)
            copies = chain.from_iterable(optimizer.fp32_groups)
            return [(low.data, copy.data) for low, copy in zip(lows, copies, strict=True)]
        return []

    def _keep_what_deepspeed_sets(self) -> None:
        """Have DeepSpeed's own functions for this (utils/tensor_fragment.py
        `safe_set_full_fp32_param`) set the module as well: they write the copy alone.
        """
        if self._spread is not None:
            self._spread.keep_what_deepspeed_sets()
        for group in self._groups:
            for parameter, _, _ in group.members:
                if hasattr(parameter, "set_full_hp_param"):
                    parameter.set_full_hp_param = MethodType(_set_both, parameter)


def _pairs_of_stage_3(optimizer: Any) -> Pairs:
    nothing = torch.empty(0)  # stands for a share in a file
    pairs: Pairs = []
    shares = optimizer.fp16_partitioned_groups_flat
    copies = optimizer.fp32_partitioned_groups_flat
    for share, copy in zip(shares, copies, strict=True):
        if share is None:
            pairs.append((nothing, nothing))
        else:
            pairs.append((share.data, copy.data))
    return pairs


def _pairs_of_fused(optimizer: FP16_Optimizer) -> Pairs:
    pairs: Pairs = []
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        pieces = flat.data.split([weight.numel() for weight in group])
        for weight, piece in zip(group, pieces, strict=True):
            pairs.append((weight.data, piece.view_as(weight)))
    return pairs


def _refusal(when: str, names: Sequence[str], reason: str, fix: str) -> TrainingError:
    return TrainingError(f"{when}: weight {_in_short(names)} {reason}; {fix} [weight-written]")


def _in_short(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


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
        most = COMPARED_ON_CPU if low.device.type == "cpu" else COMPARED_AT_ONCE
        lows = torch.split(low.view(-1), most)
        copies = torch.split(copy.view(-1), most)
        for piece in zip(lows, copies, strict=True):
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
    is_kept = copy.to(low.dtype) == low
    if len(pairs) == 1:
        torch.where(is_kept, copy, low.to(copy.dtype), out=copy)
        return
    values = torch.where(is_kept, copy, low.to(copy.dtype))
    torch._foreach_copy_(copies, torch.split(values, [copy.numel() for copy in copies]))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.view(-1) for tensor in tensors])
