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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import deepspeed
import torch
import torch.distributed
from torch import Tensor
from torch.nn import Parameter

from framework.checkpoint.state.tensor_split import RankPart, part_of
from framework.checkpoint.state.weight_parts import whole_shape
from framework.engine.distributed import gather
from framework.engine.full_shares import RankShares, Share
from framework.engine.rank_meeting import Meeting
from framework.engine.weight_sums import bit_sum
from framework.errors import TrainingError
from framework.plan.layout import Layout


@dataclass(frozen=True)
class _Reply:
    """What one rank has of a weight that was asked for.

    Attributes:
        call: the method and its arguments.
        shape: of the whole weight; None if this rank does not hold it.
        place: part in the tensor or expert group, first number and how many: ranks with one place
            have the same numbers. None for a rank without any.
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
        self._device = engine.device
        self._module = engine.module
        self._shares = RankShares(engine, has_gradients=has_gradients)
        self._plain_name = plain_name
        self._layout = layout
        self._written = written
        self._meeting = Meeting()
        self._weights: dict[str, Parameter] = {}

    def weight_names(self) -> list[str]:
        """Return the names of all weights of the model, of a pipeline in the order of stages.
        Collective.
        """
        self._meeting.wait("weight_names()")
        return self._all_names()

    def full_weight(self, name: str) -> Tensor:
        """Return a copy of a whole weight, as the optimizer steps it, in fp32. Collective."""
        return self._read(f"full_weight({name!r})", name, self._shares.weight)

    def set_full_weight(self, name: str, value: Tensor) -> None:
        """Set a weight: what the optimizer steps, and the module's copy of it. Collective."""
        call = f"set_full_weight({name!r})"
        found = self._part_to_set(call, name, value, self._shares.stepped)
        if found is None:
            return
        weight, part = found
        with torch.no_grad(), self._written.setting(), self._shares.in_memory(weight, writes=True):
            self._write(self._shares.stepped(weight), part)
            self._shares.set_module(weight, part)

    def full_gradient(self, name: str) -> Tensor:
        """Return a copy of a weight's whole gradient in fp32, between the last backward pass of a
        step and the step: averaged over ranks and micro-batches, not clipped, without loss scale.
        Collective.
        """
        call = f"full_gradient({name!r})"
        gradient = self._read(call, name, self._shares.gradient)
        return gradient.div_(self._shares.loss_scale())

    def set_full_gradient(self, name: str, value: Tensor) -> None:
        """Set the gradient that the step will clip and take. Collective."""
        call = f"set_full_gradient({name!r})"
        found = self._part_to_set(call, name, value, self._shares.gradient)
        if found is None:
            return
        weight, part = found
        part.mul_(self._shares.loss_scale())
        with torch.no_grad(), self._shares.in_memory(weight, writes=True, gradients=True):
            share = self._shares.gradient(weight)
            self._write(share, part)
            self._shares.note_norm(weight, share)

    def full_optimizer_state(self, name: str, key: str) -> Tensor:
        """Return a copy of what the optimizer keeps of every number of a weight, such as
        ``exp_avg``, in fp32. Collective.
        """
        call = f"full_optimizer_state({name!r}, {key!r})"
        return self._read(call, name, lambda weight: self._shares.state(weight, key))

    def set_full_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        """Set what the optimizer keeps of every number of a weight. Collective."""

        def share_of(weight: Parameter) -> Share | None:
            return self._shares.state(weight, key)

        call = f"set_full_optimizer_state({name!r}, {key!r})"
        found = self._part_to_set(call, name, value, share_of)
        if found is None:
            return
        weight, part = found
        with torch.no_grad(), self._shares.in_memory(weight, writes=True):
            self._write(share_of(weight), part)

    def _own_weights(self) -> Mapping[str, Parameter]:
        """Return this rank's weights by all of their names: a tied weight has several."""
        if not self._weights:
            named = self._module.named_parameters(remove_duplicate=False)
            self._weights = {self._plain_name(name): weight for name, weight in named}
        return self._weights

    @torch.no_grad()
    def _read(self, call: str, name: str, share_of: Callable[[Parameter], Share | None]) -> Tensor:
        """Return a whole tensor, fp32, on this rank's device. Collective.

        Raises:
            TrainingError: not all ranks make the same call, or there is no such tensor.
        """
        self._meeting.wait(call)
        weight = self._own_weights().get(name)
        share, replies = self._exchange(call, weight, share_of, value=None)
        shape = _common_shape(replies, call, name, self._all_names)
        whole = torch.zeros(shape, dtype=torch.float32, device=self._device)
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
        share_of: Callable[[Parameter], Share | None],
    ) -> tuple[Parameter, Tensor] | None:
        """Return a weight and this rank's part of a value, fp32, as its tensor group divides the
        weight; None if it does not hold the weight. Collective.

        Raises:
            TrainingError: not all ranks set the same value, or there is no such tensor.
        """
        self._meeting.wait(call)
        weight = self._own_weights().get(name)
        whole = torch.as_tensor(value, dtype=torch.float32, device=self._device)
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
        part = self._part_of(weight)
        if part is None:
            return weight, whole.clone()
        return weight, part.of(whole)

    def _exchange(
        self,
        call: str,
        weight: Parameter | None,
        share_of: Callable[[Parameter], Share | None],
        *,
        value: Tensor | None,
    ) -> tuple[Share | None, list[_Reply]]:
        """Return this rank's numbers, if it has any, and what all ranks have. Collective."""
        share = None
        shape = None
        place = None
        refusal = ""
        if weight is not None:
            shape = tuple(whole_shape(weight))
            try:
                with self._shares.in_memory(weight, gradients=True):
                    share = share_of(weight)
                    if share is not None:
                        part = self._part_of(weight)
                        number = -1 if part is None else part.rank
                        place = (number, share.start, share.values.numel())
                        if value is None:
                            share = Share(share.start, share.values.detach().clone())
            except LookupError as error:
                refusal = str(error.args[0])
        described = ""
        if value is not None:
            described = f"{tuple(value.shape)} {int(bit_sum(value.reshape(-1)))}"
        return share, gather(_Reply(call, shape, place, described, refusal))

    def _all_names(self) -> list[str]:
        """Return the names of all weights of all ranks, each once. Collective."""
        names: dict[str, None] = {}
        for rank_names in gather(list(self._own_weights())):
            names |= dict.fromkeys(rank_names)
        return list(names)

    def _part_of(self, weight: Parameter) -> RankPart | None:
        return part_of(
            weight,
            tensor_rank=self._layout.tensor_rank(torch.distributed.get_rank()),
            tensor_size=self._layout.tensor_size,
        )

    def _put_in(self, whole: Tensor, weight: Parameter, share: Share) -> None:
        """Write this rank's numbers into their places in a whole tensor."""
        values = share.values.reshape(-1).to(whole)
        part = self._part_of(weight)
        if part is None:
            whole.view(-1).narrow(0, share.start, values.numel()).copy_(values)
            return
        split = part.split
        shape = split.part_shape(whole.shape, part.rank, part.size)
        rank_tensor = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        rank_tensor.view(-1).narrow(0, share.start, values.numel()).copy_(values)
        offset = 0
        for begin, end in split.bounds(part.rank, part.size):
            piece = rank_tensor.narrow(split.dim, offset, end - begin)
            whole.narrow(split.dim, begin, end - begin).copy_(piece)
            offset += end - begin

    @staticmethod
    def _write(share: Share | None, part: Tensor) -> None:
        """Write the numbers of a part that this rank has."""
        if share is None:
            return
        values = part.view(-1).narrow(0, share.start, share.values.numel())
        share.values.copy_(values.view(share.values.shape))


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
