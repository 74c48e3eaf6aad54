"""Mixture of experts in place of a block's perceptron: a router sends each token to one or two of
several perceptrons, the experts.

An expert always computes as many rows as it has room for, so shapes follow from the number of
tokens alone, and nothing waits for the device. A token that finds no room in its expert passes by
on the residual stream (Lepikhin et al. 2020, "GShard", section 2.2; Fedus et al. 2021, "Switch
Transformers", section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from framework.config.model import MoE
from framework.models.added_losses import AddsLosses, Routing
from framework.models.initialized import DrawnLinear
from framework.models.sequence import mean_over_parts
from framework.models.split import SumsTogether

# The group, and whether its ranks' micro-batches may differ in their number of tokens.
_division: ContextVar[tuple[Any, bool] | None] = ContextVar("division", default=None)


@contextmanager
def dividing_experts(group: Any, *, varies: bool = False) -> Iterator[None]:
    """Divide the experts of each mixture that is built within the block over the ranks of `group`.

    `varies`: micro-batches of the ranks may differ in their number of tokens.
    """
    token = _division.set((group, varies))
    try:
        yield
    finally:
        _division.reset(token)


def sizes_of_all_ranks(
    model: nn.Module, sizes: Mapping[nn.Parameter, int]
) -> dict[nn.Parameter, int]:
    """Return for the weights of experts how many numbers all ranks that divide them have, given
    the sizes on this rank.
    """
    all_sizes: dict[nn.Parameter, int] = {}
    for mixture in model.modules():
        if isinstance(mixture, MixtureOfExperts):
            for weight in mixture.experts.parameters():
                all_sizes[weight] = mixture.size * sizes[weight]
    return all_sizes


def expert_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield this rank's weights of experts."""
    for mixture in model.modules():
        if isinstance(mixture, MixtureOfExperts):
            yield from mixture.experts.parameters()


def names_elsewhere(model: nn.Module) -> dict[str, str]:
    """Return the names of experts' weights that other ranks hold, each with the name of the weight
    of this rank that has its place in another expert.
    """
    names: dict[str, str] = {}
    for prefix, own_prefix, own_expert in _experts_elsewhere(model):
        for name, _ in own_expert.named_parameters():
            names[prefix + name] = own_prefix + name
    return names


def is_elsewhere(model: nn.Module) -> Callable[[str], bool]:
    """Return a predicate on names of weights: true for an expert's that another rank holds."""
    prefixes = tuple(prefix for prefix, _, _ in _experts_elsewhere(model))
    return lambda name: name.startswith(prefixes)


def _experts_elsewhere(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield for each expert that another rank holds: the prefix of its weights' names, and the
    prefix and the module of this rank's first expert of that mixture.
    """
    for name, mixture in model.named_modules():
        if not isinstance(mixture, MixtureOfExperts):
            continue
        own_number, own_expert = next(iter(mixture.experts.named_children()))
        for number in range(mixture.shape.num_experts):
            if str(number) not in mixture.experts:
                yield f"{name}.experts.{number}.", f"{name}.experts.{own_number}.", own_expert


class _ExchangeRows(Function):
    """Sends part r of equal parts of the first dimension to rank r of a group, and receives a part
    from each rank.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ExchangeRows.forward(ctx, gradient, ctx.group), None


class Router(DrawnLinear):
    """Tokens (tokens, hidden) to logits (tokens, experts), in float32 under every precision
    (Switch, section 2.4).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            logits: Tensor = linear(tokens.float(), self.weight.float())
            return logits


class MixtureOfExperts(AddsLosses, SumsTogether):
    """Perceptrons; each token is computed by `top_k` of them: (..., hidden) to the same shape.

    An output is the sum over the chosen experts, weighted with their probabilities (Switch,
    equation 2). The probabilities of two chosen experts are scaled to the sum 1 (GShard,
    algorithm 1). First choices find room before second ones, and earlier tokens before later ones.

    Two losses are added to the task's. Over the tokens of a micro-batch, with probabilities p of E
    experts, they are ``E sum_e f_e mean(p_e)``, where f_e is the share of tokens with expert e as
    their first choice (Switch, equation 4), and ``mean(logsumexp(logits)^2)`` (Zoph et al. 2022,
    "ST-MoE", equation 5). Where ranks share sequences, f_e is over all of their positions: the mean
    of the ranks' losses is then the loss of whole sequences.

    Attributes:
        group: ranks that share the experts, each with as many whole ones; None: this rank has all.
        size: number of ranks in the group.
        varies: micro-batches of these ranks may differ in their number of tokens.
    """

    def __init__(
        self, shape: MoE, hidden_size: int, *, make_expert: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(hidden_size, shape.num_experts, bias=False)
        self.group = None
        self.size = 1
        rank = 0
        self.varies = False
        division = _division.get()
        if division is not None:
            self.group, self.varies = division
            self.size = torch.distributed.get_world_size(self.group)
            rank = torch.distributed.get_rank(self.group)
        self.num_own = shape.num_experts // self.size
        self.experts = nn.ModuleDict()
        for number in range(shape.num_experts):
            expert = make_expert()  # drawn on every rank: its weights do not depend on the division
            if number // self.num_own == rank:
                self.experts[str(number)] = expert

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes as in the class docstring; collective where the experts are divided over ranks.
        In training it adds the losses.
        """
        tokens = hidden.flatten(0, -2)
        shape = self.shape
        num_experts = shape.num_experts
        room = shape.capacity(hidden.shape[:-1].numel(), training=self.training)
        rows_per_expert = self._largest_room(room)

        logits = self.router(self._add_jitter(tokens))
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(shape.top_k)
        if shape.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)

        # (top_k x tokens): all first choices, then all second ones.
        chosen = chosen.T.flatten()
        is_chosen = chosen[:, None] == torch.arange(num_experts, device=chosen.device)
        place = is_chosen.cumsum(0).gather(1, chosen[:, None]).squeeze(1) - 1
        fits = place < room
        # A further row, the last, takes all tokens without room, and is left out again.
        overflow = num_experts * rows_per_expert
        slots = torch.where(fits, chosen * rows_per_expert + place, overflow)

        copies = tokens.expand(shape.top_k, *tokens.shape).flatten(0, 1)
        rows = tokens.new_zeros(overflow + 1, tokens.shape[-1])
        rows = rows.index_put((slots,), copies)[:-1]
        outputs = self._run_experts(rows.view(num_experts, rows_per_expert, -1)).flatten(0, 1)
        outputs = torch.cat((outputs, outputs.new_zeros(1, outputs.shape[-1])))
        outputs = outputs.index_select(0, slots)
        weighted = outputs * weights.T.reshape(-1, 1).to(outputs.dtype)
        mixed: Tensor = weighted.view(shape.top_k, *tokens.shape).sum(0)
        outputs = mixed.view_as(hidden)
        if not self.training:
            return outputs
        return self.add(
            outputs, self._routing(logits, probabilities, is_chosen[: len(tokens)], fits)
        )

    def _run_experts(self, rows: Tensor) -> Tensor:
        """Run each expert on its rows: (experts, room, hidden) to the same shape.

        Rows of experts on other ranks are sent there, and their outputs back: then it is
        collective, and `room` must be the same on all ranks. Where a tensor group divides experts,
        their row layers are summed together.
        """
        if self.part is not None:
            rows = self.part.copy(rows)
        if self.group is not None:
            # From (ranks, own experts, room, hidden) to (own experts, ranks x room, hidden).
            rows = _ExchangeRows.apply(rows, self.group)
            rows = rows.view(self.size, self.num_own, *rows.shape[1:])
            rows = rows.transpose(0, 1).flatten(1, 2)
        pairs = zip(self.experts.values(), rows, strict=True)
        outputs = torch.stack([expert(expert_rows) for expert, expert_rows in pairs])
        if self.group is not None:
            outputs = outputs.view(self.num_own, self.size, -1, outputs.shape[-1])
            outputs = outputs.transpose(0, 1).flatten(0, 1)
            outputs = _ExchangeRows.apply(outputs, self.group)
        if self.part is not None:
            outputs = self.part.sum(outputs)
        return outputs

    def _largest_room(self, room: int) -> int:
        """Return the largest room (rows per expert) on any rank, as ranks exchange equally many
        rows.

        Ranks may differ in a last batch, by a sample, and where sequences have several lengths:
        there it is collective, and waits for the device.
        """
        if self.group is None or (self.training and not self.varies):
            return room
        largest = torch.tensor(room, device=self.router.weight.device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(largest)

    def _add_jitter(self, tokens: Tensor) -> Tensor:
        """Scale the router's input by noise, so that it tries other experts (Switch, section
        2.4).
        """
        if self.training and self.shape.jitter:
            noise = self.shape.jitter
            return tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
        return tokens

    def _routing(
        self, logits: Tensor, probabilities: Tensor, is_first_choice: Tensor, fits: Tensor
    ) -> Routing:
        """Return the losses that are added to the task's, and the share of choices without room.

        They are computed also where none are collected: recomputation needs the same tensors.

        Args:
            logits: (tokens, experts).
            probabilities: (tokens, experts).
            is_first_choice: (tokens, experts) bool.
            fits: whether a choice found room, (top_k x tokens,) bool.
        """
        shape = self.shape
        shares = mean_over_parts(is_first_choice.float().mean(0))
        balance = shape.num_experts * (shares * probabilities.mean(0)).sum()
        loss = shape.balance_loss * balance
        if shape.z_loss:
            loss = loss + shape.z_loss * logits.logsumexp(-1).square().mean()
        return Routing(loss, balance.detach(), 1.0 - fits.float().mean())
