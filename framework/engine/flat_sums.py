"""Sums of gradients of ZeRO 1 and 2 over ranks, from flat tensors in place of DeepSpeed's buckets.

DeepSpeed (0.19.8, runtime/zero/stage_1_and_2.py) copies each gradient into a bucket, adds the whole
bucket up on all ranks (`average_tensor`, `allreduce_and_scatter`), copies the parts of each weight
back, copies this rank's gradients out of the bucket (`copy_grads_in_partition`), and joins them
once more in the step: some ten calls of Python for each weight. Here all gradients are
joined in the order of the flat weights, filled up to equal shares, and added up in one message;
each rank keeps its share, and the step reads it as it is. What is too large for one message is
joined and sent piece by piece, the same elements of all ranks' shares in each.

Summands, divisor, types and shares are those of DeepSpeed: with two ranks the sums are equal to the
bit, with more they may be added in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from framework.plan.flat_sums import most_in_message


class FlatSums:
    """Stands in for `DeepSpeedEngine.allreduce_gradients`.

    Gradients wait for the last micro-batch of a step at stage 1, and at stage 2 where sums are
    coalesced; else they are added up after each micro-batch, and the sums of ranks' shares over
    micro-batches.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, waits: bool) -> None:
        """Stand in from the next backward pass on; `waits`: for the last micro-batch of a step."""
        optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        self._engine = engine
        self._optimizer = optimizer
        self._waits = waits
        self._sums_apart = waits and optimizer.use_separate_grad_accum
        self._dtype = optimizer.dtype
        if self._sums_apart:
            self._dtype = optimizer.gradient_accumulation_dtype
        self._share_dtype = optimizer.dtype
        if optimizer.use_separate_grad_accum:
            self._share_dtype = optimizer.gradient_accumulation_dtype
        self._sent_as = torch.float32
        if optimizer.sequence_parallel_size == 1:
            (self._sent_as,) = optimizer.ipg_buckets
        self._shares = _Shares(optimizer)
        self._divisor = self._shares.ranks / float(optimizer.sequence_parallel_size)
        self._hooks: list[Any] = []
        if self._sums_apart:
            for weight in self._shares.weights:
                # as they arrive: gradients in half precision are freed one by one
                register: Callable[[Any], Any] = weight.register_post_accumulate_grad_hook
                self._hooks.append(register(optimizer._fill_param_grad_accum_attribute))

    def __call__(self, bucket_size: int | None = None) -> None:
        """Add up the gradients of a backward pass, or of a step's passes, over the ranks.
        Collective, unless they wait for a later micro-batch.
        """
        is_last = self._engine.is_gradient_accumulation_boundary()
        self._optimizer.set_gradient_accumulation_boundary(is_last)
        if self._waits and not is_last:
            return
        with torch.no_grad():
            gradients = [self._gradient(weight) for weight in self._shares.weights]
            share = [self._sum_of(message, gradients) for message in self._shares.messages]
            self._keep(share)
        for weight in self._shares.weights:
            weight.grad = None
            weight.grad_accum = None

    def close(self) -> None:
        """Let go of the model, which may outlive the run."""
        for hook in self._hooks:
            hook.remove()

    def _gradient(self, weight: Any) -> Tensor:
        """Return a weight's gradient, or zeros if the weight took no part in the loss."""
        gradient: Tensor | None
        if self._sums_apart:
            gradient = weight.grad_accum  # DeepSpeed's, on every weight
        else:
            gradient = weight.grad
        if gradient is None:
            return torch.zeros_like(weight, dtype=self._dtype)
        return gradient

    def _sum_of(self, message: list[_Piece], gradients: list[Tensor]) -> Tensor:
        """Return this rank's part of the sum of a message, in the type of the shares."""
        pieces: list[Tensor] = []
        for piece in message:
            if piece.weight is None:
                pieces.append(gradients[0].new_zeros(piece.stop - piece.start))
                continue
            gradient = gradients[piece.weight]
            if piece.stop - piece.start < gradient.numel():
                gradient = gradient.reshape(-1)[piece.start : piece.stop]
            pieces.append(gradient)
        flat: Tensor = _flatten_dense_tensors(pieces)  # type: ignore[no-untyped-call]
        summed = self._shares.scatter(flat.div_(self._divisor).to(self._sent_as))
        return summed.to(self._share_dtype)

    def _keep(self, parts: list[Tensor]) -> None:
        """Keep the parts of this rank's share of all groups, or add them to that of earlier passes
        of the step.
        """
        averaged = self._optimizer.averaged_gradients
        share = parts[0]
        if len(parts) > 1:
            share = torch.cat(parts)
        for number, of_group in enumerate(torch.split(share, self._shares.sizes)):
            if averaged.get(number) is None:
                averaged[number] = self._shares.in_weights(number, of_group)
            else:
                averaged[number].flat_partition.add_(of_group)


class _Piece(NamedTuple):
    """Elements `start` to `stop` of a weight's gradient, or that many zeros for None."""

    weight: int | None
    start: int
    stop: int


class _Shares:
    """How gradients are cut into the shares of ranks, of all groups one after the other, and these
    into messages.

    Attributes:
        ranks: how many ranks have a share.
        weights: of all groups, in the order of the flat weights.
        sizes: elements of a share, by number of the group.
        messages: each lists what it consists of, in the order of the ranks that get it.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        self.weights: list[Any] = []
        self._groups: list[range] = []  # positions in `weights`
        for group in optimizer.round_robin_bit16_groups:
            first = len(self.weights)
            self.weights += group
            self._groups.append(range(first, len(self.weights)))
        self._process_group = optimizer.dp_process_group
        self.ranks = torch.distributed.get_world_size(self._process_group)
        self._rank = torch.distributed.get_rank(self._process_group)
        # gloo adds a copy of the whole tensor up to scatter it
        self._scatters = torch.distributed.get_backend(self._process_group) == "nccl"
        self.sizes = [int(size) for size in optimizer.partition_size]
        width = max(most_in_message(int(optimizer.reduce_bucket_size)) // self.ranks, 1)
        size = sum(self.sizes)
        self.messages: list[list[_Piece]] = []
        for start in range(0, size, width):
            pieces: list[_Piece] = []
            for rank in range(self.ranks):
                pieces += self._pieces(rank, start, min(start + width, size))
            self.messages.append(_joined(pieces))
        numbers = range(len(self._groups))
        self._own = [self._pieces_of(number, self._rank) for number in numbers]

    def _pieces(self, rank: int, start: int, stop: int) -> list[_Piece]:
        """Return what elements `start` to `stop` of a rank's share of all groups consist of."""
        pieces: list[_Piece] = []
        offset = 0
        for number, size in enumerate(self.sizes):
            first = max(start - offset, 0)
            last = min(stop - offset, size)
            if first < last:
                pieces += self._pieces_of(number, rank, first, last)
            offset += size
        return pieces

    def _pieces_of(
        self, number: int, rank: int, start: int = 0, stop: int | None = None
    ) -> list[_Piece]:
        """Return what elements `start` to `stop` of a rank's share of a group consist of."""
        first = rank * self.sizes[number] + start
        last = rank * self.sizes[number] + (self.sizes[number] if stop is None else stop)
        pieces: list[_Piece] = []
        offset = 0
        for position in self._groups[number]:
            size = self.weights[position].numel()
            begin = max(first - offset, 0)
            end = min(last - offset, size)
            if begin < end:
                pieces.append(_Piece(position, begin, end))
            offset += size
        if last > offset:
            pieces.append(_Piece(None, 0, last - max(first, offset)))
        return pieces

    def scatter(self, flat: Tensor) -> Tensor:
        """Add a message up over the ranks and return this rank's part of it; `flat` may be
        overwritten. Collective.
        """
        columns = flat.numel() // self.ranks
        if self._scatters:
            part = flat.new_empty(columns)
            torch.distributed.reduce_scatter_tensor(part, flat, group=self._process_group)
            return part
        torch.distributed.all_reduce(flat, group=self._process_group)
        return flat[self._rank * columns : (self._rank + 1) * columns].clone()

    def in_weights(self, number: int, share: Tensor) -> GradPartitionBufferGroup:
        """Return this rank's share of a group as the gradients of weights, or parts of them, that
        lie in it, as DeepSpeed's own step and `deepspeed.utils.safe_get_full_grad` read them.
        """
        pieces = self._own[number]
        views: list[Any] = []
        sizes = [piece.stop - piece.start for piece in pieces]
        for piece, view in zip(pieces, torch.split(share, sizes), strict=True):
            gradient: Any = view
            if piece.weight is None:
                gradient._zero_padding = True
            elif view.numel() == self.weights[piece.weight].numel():
                gradient = view.view(self.weights[piece.weight].shape)
            views.append(gradient)
        return GradPartitionBufferGroup(views, share)


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    """Join pieces that follow each other in one weight: shares end within weights."""
    joined: list[_Piece] = []
    for piece in pieces:
        if joined and piece.weight is not None:
            last = joined[-1]
            if (last.weight, last.stop) == (piece.weight, piece.start):
                joined[-1] = _Piece(piece.weight, last.start, piece.stop)
                continue
        joined.append(piece)
    return joined


def sum_flat(engine: deepspeed.DeepSpeedEngine, *, coalesces: bool) -> FlatSums | None:
    """Put `FlatSums` in place where DeepSpeed would average all gradients over one group of several
    ranks after the backward pass. Return None where its own sums stay.

    At stage 2 gradients are summed within the backward pass, bucket by bucket, unless all of them
    fit in half of one, or `coalesces`: they wait for the last micro-batch of a step.
    """
    optimizer = engine.optimizer
    if not _sums_plainly(engine):
        return None
    waits = coalesces or not optimizer.partition_gradients
    limit = most_in_message(int(optimizer.reduce_bucket_size))
    sizes = [flat.numel() for flat in optimizer.bit16_groups_flat]
    if not waits and sum(sizes) > limit:
        return None
    # `DeepSpeedEngine.backward` ends its pass by itself, and asks for no hook
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks = []
    sums = FlatSums(engine, waits=waits)
    engine.allreduce_gradients = sums
    return sums


def wait_for_last(engine: deepspeed.DeepSpeedEngine) -> None:
    """Have DeepSpeed's own sums of stage 2 wait for the last micro-batch of a step, as
    `DeepSpeedEngine.coalesce_grad_reduction` does, where `FlatSums` are not in place.
    """
    optimizer = engine.optimizer
    optimizer._coalesce_grad_reduction = True
    # micro-batches are summed in fp32 where stage 2 sums its shares so
    optimizer.use_grad_accum_attribute = optimizer.use_separate_grad_accum

    def add_up(bucket_size: int | None = None) -> None:
        is_last = engine.is_gradient_accumulation_boundary()
        optimizer.set_gradient_accumulation_boundary(is_last)
        if is_last:
            if optimizer.use_grad_accum_attribute:
                optimizer.fill_grad_accum_attribute()
            optimizer._coalesce_grad_reduction = False
            engine._flush_coalesced_reduction_zero12(optimizer)
            optimizer._coalesce_grad_reduction = True

    engine.allreduce_gradients = add_up


def _sums_plainly(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Check whether DeepSpeed would average all gradients over one group of ranks, in one type."""
    optimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer or engine.pipeline_parallelism:
        return False
    is_elsewhere = optimizer.cpu_offload or optimizer.has_moe_layers or optimizer.overlap_comm
    if is_elsewhere or not engine.managed_gradient_accumulation():
        return False
    averages = optimizer.gradient_average and optimizer.reduce_scatter
    if not averages or not optimizer.use_multi_rank_bucket_allreduce:
        return False
    if engine.torch_autocast_enabled() or not optimizer.contiguous_gradients:
        return False
    if len(optimizer.ipg_buckets) != 1 or any(map(any, optimizer.round_robin_bit16_padding)):
        return False
    ranks = torch.distributed.get_world_size(optimizer.dp_process_group)
    groups = optimizer.real_dp_process_group
    return ranks > 1 and all(torch.distributed.get_world_size(group) == ranks for group in groups)
