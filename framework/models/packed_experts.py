"""Experts of other people's models over ranks: modules that hold the experts of a layer in tensors
of (experts, ...), and that are given tokens with the experts which a router has chosen. That is the
interface of transformers 5 (`use_experts_implementation`).

Each rank of a group holds some whole experts. A token is sent once to every expert that it chose,
and its outputs come back; ranks first exchange how many they send, so that nothing is dropped and
no room is left empty. Ranks of a tensor group have the same tokens: each computes them by the
experts that it holds, and they sum up what they made. The module itself computes what arrives, in
the way that the model's config names: expert after expert (``eager``) or in grouped products
(``grouped_mm``).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import Function

from framework.models.split import TensorPart

# Attributes that transformers' decorator gives to every module of experts.
_INTERFACE = ("num_experts", "has_gate", "is_transposed")
_DIVIDED = "divided_experts"  # attribute of a module


def find_packed(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that hold packed experts, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and all(hasattr(module, attribute) for attribute in _INTERFACE):
            found[name] = module
    return found


class _ExchangeRows(Function):
    """Sends rows to the ranks of a group, `sent[r]` of them to rank r, and receives `received[r]`
    from it, in the order of ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        arrived = rows.new_empty(sum(received), rows.shape[-1])
        torch.distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = _ExchangeRows.forward(ctx, gradient, ctx.group, ctx.received, ctx.sent)
        return back, None, None, None


@dataclass(frozen=True)
class _Journey:
    """How the rows of a rank travel.

    Attributes:
        order: (rows that are sent,) int64: of all choices, (tokens x choices), those that are sent,
            by expert.
        sent, received: rows to and from each rank.
        experts: (rows that arrive,) int64: the number of each row's expert among this rank's.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor


class DividedExperts:
    """The forward pass of a module where each rank has some of the experts. Collective.

    Attributes:
        group: ranks with other tokens that share the experts of this rank's tensor part; None: none
            do.
    """

    group: Any = None

    def __init__(self, module: Any) -> None:
        """Take a module. Its `num_experts` counts this rank's; its `part`, if it has one, is this
        rank's place in the tensor group that shares all experts.
        """
        self._module = module
        self._compute = module.forward
        self._signature = inspect.signature(module.forward)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Compute what the module is given, under the names that it has for them."""
        hidden, chosen, weights = self._signature.bind(*inputs, **named).args
        part: TensorPart | None = vars(self._module).get("part")
        if part is None:
            return self._mix(hidden, chosen, weights)
        own = chosen - part.rank * self._num_of_part
        is_elsewhere = (own < 0) | (own >= self._num_of_part)
        own = own.masked_fill(is_elsewhere, self._num_of_part)
        # Each rank has the gradients that its own experts give: both are summed up.
        return part.sum(self._mix(part.copy(hidden), own, part.copy(weights)))

    @property
    def _num_own(self) -> int:
        num_own: int = self._module.num_experts
        return num_own

    @property
    def _group_size(self) -> int:
        """Ranks of the group."""
        if self.group is None:
            return 1
        return torch.distributed.get_world_size(self.group)

    @property
    def _num_of_part(self) -> int:
        """Experts of all ranks of the group."""
        return self._num_own * self._group_size

    def _mix(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, of the shape of `hidden`.

        Args:
            hidden: (tokens, hidden).
            chosen: (tokens, choices) int64: numbers of experts; a number beyond the last one stands
                for a choice that no expert computes.
            weights: (tokens, choices): of each output.
        """
        tokens = hidden.flatten(0, -2)
        choices = chosen.shape[-1]
        journey = self._plan(chosen.reshape(-1))
        rows = tokens[journey.order // choices]
        rows = self._exchange(rows, journey.sent, journey.received)
        outputs = self._compute_rows(rows, journey.experts)
        outputs = self._exchange(outputs, journey.received, journey.sent)
        outputs = outputs * weights.reshape(-1)[journey.order].unsqueeze(-1)
        return self._sum(outputs, journey.order, choices, tokens).view_as(hidden)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self.group is None:
            return rows
        exchanged: Tensor = _ExchangeRows.apply(rows, self.group, sent, received)
        return exchanged

    def _plan(self, chosen: Tensor) -> _Journey:
        """Exchange how many rows go to each expert. It waits for the device, once."""
        num_experts = self._num_of_part
        counts = torch.bincount(chosen, minlength=num_experts)[:num_experts]
        arriving = counts
        if self.group is not None:
            arriving = torch.empty_like(counts)
            torch.distributed.all_to_all_single(arriving, counts, group=self.group)
        by_rank = torch.stack((counts, arriving)).view(2, self._group_size, self._num_own).sum(-1)
        sent, received = by_rank.tolist()
        order = chosen.argsort(stable=True)[: sum(sent)]
        own = torch.arange(self._num_own, device=chosen.device).repeat(self._group_size)
        experts = own.repeat_interleave(arriving, output_size=sum(received))
        return _Journey(order, sent, received, experts)

    def _compute_rows(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Compute each row (rows, hidden) by its expert (rows,)."""
        num_rows = len(rows)
        if num_rows == 0:
            # A row of zeros, and its output goes nowhere: the weights get a gradient, which
            # ZeRO waits for.
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[-1])))
            experts = torch.cat((experts, experts.new_zeros(1)))
        whole = rows.new_ones(len(rows), 1)
        outputs: Tensor = self._compute(rows, experts.unsqueeze(-1), whole)
        return outputs[:num_rows]

    @staticmethod
    def _sum(outputs: Tensor, order: Tensor, choices: int, tokens: Tensor) -> Tensor:
        """Add up the outputs of each token: (rows that were sent, hidden) to the shape and type of
        `tokens`.
        """
        num_missing = len(tokens) * choices - len(outputs)
        place = order.new_full((len(tokens) * choices,), len(outputs))
        place[order] = torch.arange(len(outputs), device=order.device)
        if num_missing:  # choices that no expert computes
            outputs = torch.cat((outputs, outputs.new_zeros(1, outputs.shape[-1])))
        summed = outputs[place].view(len(tokens), choices, -1).sum(1)
        return summed.to(tokens.dtype)


def divided_experts(module: Any) -> DividedExperts:
    """Return what computes a module's forward pass with some of its experts on each rank; put in
    the place of the module's own, if that was not done yet.
    """
    known: DividedExperts | None = vars(module).get(_DIVIDED)
    if known is None:
        known = DividedExperts(module)
        setattr(module, _DIVIDED, known)
        # Not compiled: how many rows travel is known on the host alone.
        module.forward = torch.compiler.disable(known.forward)  # type: ignore[no-untyped-call]
    return known
