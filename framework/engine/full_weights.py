"""Whole weights, gradients and optimizer states of a model in training, by the names of its
weights: read and set at every ZeRO stage, in pipelines and in tensor groups.

DeepSpeed has such functions for one rank's parameters (utils/tensor_fragment.py
`safe_get_full_fp32_param` and its neighbours): they know no other stage of a pipeline, no part of a
tensor group, and set the fp32 copy alone. Here each rank puts the numbers that it steps into a
tensor of zeros, and their bits are added up over all ranks: of what several ranks have alike, one
rank gives it.

Every call is made by all ranks. They meet in the store of the process group before the first
collective, so that a call of one rank alone ends with an error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.nn import Parameter

from framework.checkpoint.state.optimizer_shards import OptimizerViews, ParameterPiece
from framework.checkpoint.state.tensor_split import split_of, whole_shape
from framework.engine.distributed import gather
from framework.engine.spread_weights import rank_share, set_share
from framework.engine.weight_sums import bit_sum
from framework.errors import TrainingError, counted
from framework.plan.layout import Layout

WAIT_SECONDS: float = 300.0
"""How long a call waits for the other ranks."""
_LONGEST_PAUSE: Final = 0.05  # seconds between two looks into the store
_numbers = itertools.count()  # of objects, which all ranks make in one order


@dataclass(frozen=True)
class _Share:
    """This rank's numbers of a tensor.

    Attributes:
        start: where they begin in the flattened tensor, or in this rank's part of it.
        values: the numbers, writable; of any shape.
    """

    start: int
    values: Tensor


@dataclass(frozen=True)
class _Reply:
    """What one rank has of a weight that was asked for.

    Attributes:
        call: the method and its arguments.
        shape: of the whole weight; None if this rank does not hold it.
        place: part in the tensor group, first number and how many: ranks with one place have the
            same numbers. None for a rank without any.
        value: shape and sum of the bits of the value that is set.
        refusal: why it cannot be had.
    """

    call: str
    shape: tuple[int, ...] | None
    place: tuple[int, int, int] | None
    value: str
    refusal: str


class FullWeights:
    """The whole tensors of one engine."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        *,
        layout: Layout,
        written: Any,
        plain_name: Callable[[str], str],
        has_gradients: Callable[[], bool],
    ) -> None:
        """Take an engine.

        Args:
            engine: with its optimizer.
            layout: of the ranks.
            written: the `WrittenWeights` or `PlainWeights` of the engine.
            plain_name: returns the plain model's name of a weight of the engine's module.
            has_gradients: returns whether the gradients of a step are complete now.
        """
        self._engine = engine
        self._optimizer = engine.optimizer
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._views = OptimizerViews(engine, {})
        self._plain_name = plain_name
        self._layout = layout
        self._written = written
        self._meeting = _Meeting()
        self._weights: dict[str, Parameter] = {}
        self._has_gradients = has_gradients

    def weight_names(self) -> list[str]:
        """Return the names of all weights of the model, those of a pipeline's stages in their
        order. Collective.
        """
        self._meeting.wait("weight_names()")
        names: dict[str, None] = {}
        for rank_names in gather(list(self._own_weights())):
            names |= dict.fromkeys(rank_names)
        return list(names)

    def full_weight(self, name: str) -> Tensor:
        """Return a copy of a whole weight, as the optimizer steps it, in fp32. Collective."""
        return self._read(f"full_weight({name!r})", name, self._weight_share)

    def set_full_weight(self, name: str, value: Tensor) -> None:
        """Set a weight: what the optimizer steps, and the module's copy of it. Collective."""
        call = f"set_full_weight({name!r})"
        part = self._part_to_set(call, name, value, self._stepped_share)
        weight = self._own_weights().get(name)
        if part is None or weight is None:
            return
        with torch.no_grad(), self._written.setting(), self._in_memory(weight, writes=True):
            self._write(self._stepped_share(weight), part)
            self._set_module(weight, part)

    def full_gradient(self, name: str) -> Tensor:
        """Return a copy of a weight's whole gradient in fp32, between the last backward pass of a
        step and the step: averaged over ranks and micro-batches, not clipped, without loss scale.
        Collective.
        """
        call = f"full_gradient({name!r})"
        gradient = self._read(call, name, self._gradient_share)
        return gradient.div_(self._loss_scale())

    def set_full_gradient(self, name: str, value: Tensor) -> None:
        """Set the gradient that the step will clip and take. Collective."""
        call = f"set_full_gradient({name!r})"
        part = self._part_to_set(call, name, value, self._gradient_share)
        weight = self._own_weights().get(name)
        if part is None or weight is None:
            return
        part.mul_(self._loss_scale())
        with torch.no_grad(), self._in_memory(weight, writes=True, gradients=True):
            share = self._gradient_share(weight)
            self._write(share, part)
            self._note_norm(weight, share)

    def full_optimizer_state(self, name: str, key: str) -> Tensor:
        """Return a copy of what the optimizer keeps of every number of a weight, such as
        ``exp_avg``, in fp32. Collective.
        """
        call = f"full_optimizer_state({name!r}, {key!r})"
        return self._read(call, name, lambda weight: self._state_share(weight, key))

    def set_full_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        """Set what the optimizer keeps of every number of a weight. Collective."""

        def share_of(weight: Parameter) -> _Share | None:
            return self._state_share(weight, key)

        call = f"set_full_optimizer_state({name!r}, {key!r})"
        part = self._part_to_set(call, name, value, share_of)
        weight = self._own_weights().get(name)
        if part is None or weight is None:
            return
        with torch.no_grad(), self._in_memory(weight, writes=True):
            self._write(share_of(weight), part)

    def _own_weights(self) -> Mapping[str, Parameter]:
        """Return this rank's weights by all of their names: a tied weight has several."""
        if not self._weights:
            named = self._engine.module.named_parameters(remove_duplicate=False)
            self._weights = {self._plain_name(name): weight for name, weight in named}
        return self._weights

    @torch.no_grad()
    def _read(self, call: str, name: str, share_of: Callable[[Parameter], _Share | None]) -> Tensor:
        """Return a whole tensor, fp32, on this rank's device. Collective.

        Raises:
            TrainingError: not all ranks make the same call, or there is no such tensor.
        """
        self._meeting.wait(call)
        weight = self._own_weights().get(name)
        share, replies = self._exchange(call, weight, share_of, value=None)
        shape = _common_shape(replies, call, name, self._all_names)
        whole = torch.zeros(shape, dtype=torch.float32, device=self._engine.device)
        if weight is not None and share is not None and _is_giver(replies):
            self._put_in(whole, weight, share)
        torch.distributed.all_reduce(whole.view(-1).view(torch.int32))
        return whole

    @torch.no_grad()
    def _part_to_set(
        self,
        call: str,
        name: str,
        value: Tensor,
        share_of: Callable[[Parameter], _Share | None],
    ) -> Tensor | None:
        """Return this rank's part of a value, fp32, as its tensor group divides the weight; None if
        it does not hold the weight. Collective.

        Raises:
            TrainingError: not all ranks set the same value, or there is no such tensor.
        """
        self._meeting.wait(call)
        weight = self._own_weights().get(name)
        whole = torch.as_tensor(value, dtype=torch.float32, device=self._engine.device)
        whole = whole.detach().contiguous()
        _, replies = self._exchange(call, weight, share_of, value=whole)
        shape = _common_shape(replies, call, name, self._all_names)
        if len({reply.value for reply in replies}) > 1:
            raise TrainingError(
                f"{call}: the ranks set different values; draw from a generator with one seed on "
                "all ranks, or from what all ranks have alike [weight-differs-between-ranks]"
            )
        if tuple(whole.shape) != shape:
            reason = f"the value has the shape {tuple(whole.shape)}, and the weight {shape}"
            raise TrainingError(f"{call}: {reason} [full-weight-unavailable]")
        if weight is None:
            return None
        split = split_of(weight)
        if split is None:
            return whole.clone()
        rank = self._layout.tensor_rank(torch.distributed.get_rank())
        return split.part(whole, rank, self._layout.tensor_size)

    def _exchange(
        self,
        call: str,
        weight: Parameter | None,
        share_of: Callable[[Parameter], _Share | None],
        *,
        value: Tensor | None,
    ) -> tuple[_Share | None, list[_Reply]]:
        """Return this rank's numbers, if it has any, and what all ranks have. Collective."""
        share = None
        shape = None
        place = None
        refusal = ""
        if weight is not None:
            shape = tuple(whole_shape(weight))
            try:
                with self._in_memory(weight, gradients=True):
                    share = share_of(weight)
                    if share is not None:
                        share = _Share(share.start, share.values.detach().clone())
            except LookupError as error:
                refusal = str(error.args[0])
        if share is not None and weight is not None:
            part = -1
            if split_of(weight) is not None:
                part = self._layout.tensor_rank(torch.distributed.get_rank())
            place = (part, share.start, share.values.numel())
        described = ""
        if value is not None:
            described = f"{tuple(value.shape)} {int(bit_sum(value.reshape(-1)))}"
        return share, gather(_Reply(call, shape, place, described, refusal))

    def _all_names(self) -> list[str]:
        names: list[str] = []
        for rank_names in gather(list(self._own_weights())):
            names += rank_names
        return names

    def _put_in(self, whole: Tensor, weight: Parameter, share: _Share) -> None:
        """Write this rank's numbers into their places in a whole tensor."""
        values = share.values.reshape(-1).to(whole)
        split = split_of(weight)
        if split is None:
            whole.view(-1).narrow(0, share.start, values.numel()).copy_(values)
            return
        rank = self._layout.tensor_rank(torch.distributed.get_rank())
        shape = split.part_shape(whole.shape, rank, self._layout.tensor_size)
        part = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        part.view(-1).narrow(0, share.start, values.numel()).copy_(values)
        offset = 0
        for begin, end in split.bounds(rank, self._layout.tensor_size):
            piece = part.narrow(split.dim, offset, end - begin)
            whole.narrow(split.dim, begin, end - begin).copy_(piece)
            offset += end - begin

    @staticmethod
    def _write(share: _Share | None, part: Tensor) -> None:
        """Write the numbers of a part that this rank has."""
        if share is None:
            return
        values = part.view(-1).narrow(0, share.start, share.values.numel())
        share.values.copy_(values.view(share.values.shape))

    def _weight_share(self, weight: Parameter) -> _Share | None:
        """Return this rank's numbers of a weight: those that are stepped, with what code of the run
        has written into the module since; of a frozen weight the module's.
        """
        if not weight.is_floating_point():
            raise LookupError(f"it is of {weight.dtype}, which no optimizer steps")
        piece = self._views.piece_of(weight)
        if piece is None:
            if self._views.is_stepped(weight):
                return None
            return _module_share(weight)
        stepped = _numbers_of(piece.stepped.data, piece.offset, piece.num)
        low = _module_share(weight, piece)
        if low is None or low.values.data_ptr() == stepped.data_ptr():
            return _Share(piece.start, stepped)
        rounded = low.values.reshape(stepped.shape).to(stepped.device)
        is_kept = stepped.to(rounded.dtype) == rounded
        return _Share(piece.start, torch.where(is_kept, stepped, rounded.to(stepped.dtype)))

    def _stepped_share(self, weight: Any) -> _Share | None:
        """Return this rank's numbers of a weight that are to be set before the module's are."""
        if not weight.is_floating_point():
            raise LookupError(f"it is of {weight.dtype}, which no optimizer steps")
        if hasattr(weight, "ds_id"):
            kept = weight.ds_tensor
            is_plain = weight.ds_secondary_tensor is None and not hasattr(kept, "ds_quant_scale")
            if not is_plain or kept.numel() < rank_share(weight)[1]:
                raise LookupError(
                    "DeepSpeed keeps it a second time, quantized or in a file; leave out "
                    "zero_hpz_partition_size, zero_quantized_weights and zero.offload_param"
                )
        piece = self._views.piece_of(weight)
        if piece is None:
            return None
        return _Share(piece.start, _numbers_of(piece.stepped.data, piece.offset, piece.num))

    def _set_module(self, weight: Any, part: Tensor) -> None:
        """Write a weight's part into the module."""
        if not hasattr(weight, "ds_id"):
            weight.data.copy_(part.view(weight.shape))
            return
        start, count = rank_share(weight)
        set_share(weight, part.view(-1)[start : start + count])
        if weight.ds_status is ZeroParamStatus.AVAILABLE:
            weight.data.copy_(part.view(weight.shape))

    def _gradient_share(self, weight: Parameter) -> _Share | None:
        """Return this rank's numbers of a weight's gradient, multiplied by the loss scale."""
        if not self._has_gradients():
            raise LookupError(
                "gradients are complete between the last backward pass of a step and the step: in "
                "on_gradients of a callback, or before step() of a loop of your own"
            )
        if not weight.requires_grad or not self._views.is_stepped(weight):
            raise LookupError("it is not trained, and has no gradient")
        optimizer = self._optimizer
        if hasattr(optimizer, "fp32_groups_gradients"):  # whole on every rank
            for group, gradients in zip(
                optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True
            ):
                for member, gradient in zip(group, gradients, strict=True):
                    if member is weight:
                        return _Share(0, gradient)
        if not hasattr(optimizer, "averaged_gradients"):
            return _Share(0, _plain_gradient(weight))
        piece = self._views.piece_of(weight)
        if piece is None:
            return None
        return _Share(piece.start, self._flat_gradient(piece))

    def _flat_gradient(self, piece: ParameterPiece) -> Tensor:
        """Return the numbers of a piece's gradient at ZeRO 1 to 3."""
        optimizer = self._optimizer
        is_on_host = getattr(optimizer, "offload_optimizer", getattr(optimizer, "cpu_offload", 0))
        if is_on_host and piece.stepped.grad is not None:
            return _numbers_of(piece.stepped.grad, piece.offset, piece.num)
        gradients = optimizer.averaged_gradients.get(self._number_of(piece))
        if gradients is None:
            raise LookupError("DeepSpeed has taken its gradient already")
        offset = piece.offset
        for gradient in gradients:
            if offset < gradient.numel():
                return _numbers_of(gradient, offset, piece.num)
            offset -= gradient.numel()
        raise LookupError("DeepSpeed keeps no gradient of it")

    def _number_of(self, piece: ParameterPiece) -> int:
        """Return the number of the group that a piece lies in, at ZeRO 1 to 3."""
        optimizer = self._optimizer
        flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)
        if flats is None:
            flats = optimizer.single_partition_of_fp32_groups
        return next(number for number, flat in enumerate(flats) if flat is piece.stepped)

    def _note_norm(self, weight: Parameter, share: _Share | None) -> None:
        """Have DeepSpeed clip by the gradient that was set: of gradients on the host it keeps the
        norms (`norm_for_param_grads`).
        """
        norms = getattr(self._optimizer, "norm_for_param_grads", None)
        if not norms or share is None:
            return
        key = self._optimizer.get_param_id(weight)
        if key in norms:
            norms[key] = share.values.to(norms[key]).norm(2)

    def _state_share(self, weight: Parameter, key: str) -> _Share | None:
        """Return this rank's numbers of a state of the optimizer."""
        if not self._views.is_stepped(weight):
            raise LookupError("it is not trained, and the optimizer keeps nothing of it")
        piece = self._views.piece_of(weight)
        if piece is None:
            return None
        state = self._base.state.get(piece.stepped, {})
        known = [
            name
            for name, tensor in state.items()
            if type(tensor) in (Tensor, Parameter) and tensor.numel() == piece.stepped.numel()
        ]
        if key not in known:
            if known:
                reason = f"of every number the optimizer keeps {', '.join(known)}"
            else:
                reason = "the optimizer keeps nothing of every number; before its first step none"
            raise LookupError(reason)
        return _Share(piece.start, _numbers_of(state[key], piece.offset, piece.num))

    def _loss_scale(self) -> float:
        """Return the factor by which gradients were multiplied in the backward pass."""
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        if scaler is None:
            scaler = getattr(self._optimizer, "torch_autocast_gradscaler", None)
        if scaler is not None:
            return float(scaler.get_scale())
        return float(getattr(self._optimizer, "loss_scale", 1.0) or 1.0)

    @contextmanager
    def _in_memory(
        self, weight: Parameter, *, writes: bool = False, gradients: bool = False
    ) -> Iterator[None]:
        """Hold what is stepped for a weight in memory within the block, if it lies in a file."""
        optimizer = self._optimizer
        number = None
        if getattr(optimizer, "swap_optimizer", False):
            piece = self._views.piece_of(weight)
            if piece is not None:
                number = self._number_of(piece)
        if number is None or not optimizer._swappable_optimizer_subgroup(number):
            yield
            return
        optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if not writes:
                optimizer._release_swap_buffers(number)
            elif gradients:
                optimizer._writeback_swap_state(number, write_opt_state=False, write_gradients=True)
            else:
                optimizer._optimizer_states_and_gradient_swap_out(number)


class _Meeting:
    """A place in the store of the process group where all ranks meet before a collective."""

    def __init__(self) -> None:
        self._rank = torch.distributed.get_rank()
        self._num_ranks = torch.distributed.get_world_size()
        self._num_calls = 0
        self._store: Store | None = None
        store: Store | None = _get_default_store()  # MPI's groups have none
        if store is not None and self._num_ranks > 1:
            # On a connection of its own: the group's may be kept by a thread that waits for a peer.
            self._store = PrefixStore(f"full-weights/{next(_numbers)}", store).clone()

    def wait(self, call: str) -> None:
        """Wait until all ranks have come as often as this one.

        Raises:
            TrainingError: some did not come within `WAIT_SECONDS`.
        """
        if self._store is None:
            return
        self._num_calls += 1
        self._store.set(f"rank/{self._rank}", str(self._num_calls))
        wanted = self._num_calls * self._num_ranks
        if self._store.add("came", 1) >= wanted:
            return
        deadline = time.monotonic() + WAIT_SECONDS
        pause = 0.0005
        while self._store.add("came", 0) < wanted:
            if time.monotonic() > deadline:
                raise self._alone(call)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _alone(self, call: str) -> TrainingError:
        assert self._store is not None
        missing = []
        for rank in range(self._num_ranks):
            key = f"rank/{rank}"
            if not self._store.check([key]) or int(self._store.get(key)) < self._num_calls:
                missing.append(str(rank))
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        error = TrainingError(
            f"rank {self._rank}: {call}: {counted(len(missing), 'rank')} ({shown}) did not call it "
            f"within {WAIT_SECONDS:.0f} s; every rank holds a part of the weights: call it on all "
            "ranks, outside of `if state.is_main` and the like [not-on-every-rank]"
        )
        error.is_of_one_rank = True
        return error


def _common_shape(
    replies: list[_Reply], call: str, name: str, all_names: Callable[[], list[str]]
) -> tuple[int, ...]:
    """Return the shape of the whole weight, which at least one rank holds.

    Raises:
        TrainingError: the ranks make different calls, or the tensor cannot be had.
    """
    for rank, reply in enumerate(replies):
        if reply.call != replies[0].call:
            raise TrainingError(
                f"rank 0 calls {replies[0].call} and rank {rank} {reply.call}: every rank holds a "
                "part of the weights; make the same calls in the same order on all ranks "
                "[not-on-every-rank]"
            )
    refusals = [reply.refusal for reply in replies if reply.refusal]
    if refusals:
        raise TrainingError(f"{call}: {refusals[0]} [full-weight-unavailable]")
    shapes = [reply.shape for reply in replies if reply.shape is not None]
    if not shapes:
        close = get_close_matches(name, all_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ", see weight_names()"
        raise TrainingError(f"{call}: the model has no such weight{hint} [full-weight-unavailable]")
    return shapes[0]


def _is_giver(replies: list[_Reply]) -> bool:
    """Check whether this rank is the first one with its numbers."""
    rank = torch.distributed.get_rank()
    places = [reply.place for reply in replies]
    return places.index(places[rank]) == rank


def _numbers_of(tensor: Tensor, offset: int, num: int) -> Tensor:
    """Return numbers of a flattened tensor, as a view."""
    if offset == 0 and num == tensor.numel():
        return tensor
    return tensor.view(-1).narrow(0, offset, num)


def _plain_gradient(weight: Parameter) -> Tensor:
    """Return a weight's gradient at ZeRO 0; one without any gets zeros, as in the step."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    if weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
    return weight.grad


def _module_share(weight: Any, piece: ParameterPiece | None = None) -> _Share | None:
    """Return the numbers of a weight in the module that this rank keeps: those of a piece, or all
    that it has. None if the module's are not to be compared: DeepSpeed has rounded them to fewer
    bits, or they lie in a file.
    """
    if not hasattr(weight, "ds_id"):
        if piece is None:
            return _Share(0, weight.data)
        flat = weight.data.reshape(-1)
        return _Share(piece.start, flat.narrow(0, piece.start, piece.num))
    start, count = rank_share(weight)
    kept = weight.ds_tensor
    if kept.numel() < count or hasattr(kept, "ds_quant_scale"):
        if piece is not None:
            return None
        raise LookupError("DeepSpeed keeps it in a file, or quantized")
    if not count:
        return None
    if weight.ds_status is ZeroParamStatus.AVAILABLE:
        return _Share(start, weight.data.reshape(-1).narrow(0, start, count))
    return _Share(start, kept.narrow(0, 0, count))
