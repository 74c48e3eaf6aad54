"""Mixture of experts in place of a block's perceptron: a router gives each token to one or two of
several perceptrons.

Shapes follow from those of the tokens alone, and nothing waits for the device: an expert computes
as many rows as it has room for, and a token that finds none passes by on the residual stream
(Lepikhin et al. 2020, "GShard", section 2.2; Fedus et al. 2021, "Switch Transformers", section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from framework.config.model import MoE
from framework.models.initialized import DrawnLinear


class Routing(NamedTuple):
    """What a mixture adds to the loss of a micro-batch, and what it reports: 0-d float32 tensors.

    Attributes:
        loss: to be added to that of the task, weighted, differentiable.
        balance: the balance loss alone, detached; 1 where all experts get as many tokens.
        dropped: share of the choices that found no room.
    """

    loss: Tensor
    balance: Tensor
    dropped: Tensor


_collected: ContextVar[list[Routing] | None] = ContextVar("collected", default=None)
_group: ContextVar[Any] = ContextVar("group", default=None)


@contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def collected_routings() -> AbstractContextManager[list[Routing]]:
    """Collect what the mixtures that run meanwhile report; activations that are computed again come
    later, and add nothing.
    """
    return _holding(_collected, [])


def dividing_experts(group: Any, *, varies: bool = False) -> AbstractContextManager[Any]:
    """Build mixtures meanwhile that hold a rank's share of their experts, of which the ranks of
    `group` have all; `varies`: their micro-batches may hold unlike many tokens.
    """
    return _holding(_group, (group, varies))


def routing_metrics(reported: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Means of the balance and of the dropped share that mixtures have reported in a step; waits
    for the device.
    """
    if not reported:
        return {}
    balance, dropped = torch.stack([torch.stack(pair) for pair in reported]).mean(0).tolist()
    return {"train/balance_loss": balance, "train/dropped_tokens": dropped}


def is_elsewhere(model: nn.Module) -> Callable[[str], bool]:
    """Return what tells whether a weight's name is that of an expert which another rank holds."""
    mixtures = ((name, one) for name, one in model.named_modules() if isinstance(one, Mixture))
    prefixes = tuple(
        f"{name}.experts.{number}."
        for name, one in mixtures
        for number in range(one.shape.num_experts)
        if str(number) not in one.experts
    )
    return lambda name: name.startswith(prefixes)


class _Exchange(Function):
    """Sends the r-th of equal parts of the first dimension to rank r of a group, and receives one
    from each.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None


class Router(DrawnLinear):
    """Tokens (tokens, hidden) to logits (tokens, experts), in float32 whatever the precision
    (Switch, section 2.4).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            logits: Tensor = linear(tokens.float(), self.weight.float())
            return logits


class Mixture(nn.Module):
    """Perceptrons of which each token takes `top_k`: (..., hidden) to the same.

    An output is the sum over the chosen experts, weighted with their probabilities (Switch,
    equation 2), which two experts share as if there were no other (GShard, algorithm 1). First
    choices find room before second ones, and earlier tokens before later ones.

    Beside the task's loss stand, over the tokens of a micro-batch with probabilities p of E
    experts: ``E sum_e f_e mean(p_e)``, where f_e is the share of tokens whose first choice is
    expert e (Switch, equation 4), and ``mean(logsumexp(logits)^2)`` (Zoph et al. 2022, "ST-MoE",
    equation 5).
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
        found = _group.get()
        if found is not None:
            self.group, self.varies = found
            self.size, rank = (
                torch.distributed.get_world_size(self.group),
                torch.distributed.get_rank(self.group),
            )
        self.num_own = shape.num_experts // self.size
        self.experts = nn.ModuleDict()
        for number in range(shape.num_experts):
            expert = make_expert()  # drawn by all, so that each is the same wherever it is
            if number // self.num_own == rank:
                self.experts[str(number)] = expert

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        shape = self.shape
        count = shape.num_experts
        room = shape.capacity(hidden.shape[:-1].numel(), training=self.training)
        width = self._most(room)
        logits = self.router(self._jittered(tokens))
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(shape.top_k)
        if shape.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = chosen.T.flatten()
        is_of = chosen[:, None] == torch.arange(count, device=chosen.device)
        place = is_of.cumsum(0).gather(1, chosen[:, None]).squeeze(1) - 1
        fits = place < room
        # One row more takes what finds no room, and is left out again.
        slots = torch.where(fits, chosen * width + place, count * width)
        rows = tokens.new_zeros(count * width + 1, tokens.shape[-1])
        rows = rows.index_put((slots,), tokens.expand(shape.top_k, *tokens.shape).flatten(0, 1))[
            :-1
        ]
        made = self._run(rows.view(count, width, -1)).flatten(0, 1)
        made = torch.cat((made, made.new_zeros(1, made.shape[-1]))).index_select(0, slots)
        mixed: Tensor = (
            (made * weights.T.reshape(-1, 1).to(made.dtype)).view(shape.top_k, *tokens.shape).sum(0)
        )
        if self.training:
            self._report(logits, probabilities, is_of[: len(tokens)], fits)
        return mixed.view_as(hidden)

    def _run(self, rows: Tensor) -> Tensor:
        """(experts, room, hidden) to the same, each expert its own rows; those of other ranks
        travel.
        """
        if self.group is not None:
            # From (ranks, own experts, room, hidden) to (own experts, ranks x room, hidden), and
            # back.
            rows = _Exchange.apply(rows, self.group)
            rows = rows.view(self.size, self.num_own, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)
        made = torch.stack(
            [expert(own) for expert, own in zip(self.experts.values(), rows, strict=True)]
        )
        if self.group is not None:
            made = (
                made.view(self.num_own, self.size, -1, made.shape[-1]).transpose(0, 1).flatten(0, 1)
            )
            made = _Exchange.apply(made, self.group)
        return made

    def _most(self, room: int) -> int:
        """Return what any rank has of room: last batches differ by a sample, and sequences may in
        length.
        """
        if self.group is None or (self.training and not self.varies):
            return room
        most = torch.tensor(room, device=self.router.weight.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(most)

    def _jittered(self, tokens: Tensor) -> Tensor:
        """Noise on what the router sees, by which it tries other experts (Switch, section 2.4)."""
        noise = self.shape.jitter if self.training else 0.0
        if noise:
            return tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
        return tokens

    def _report(
        self, logits: Tensor, probabilities: Tensor, is_first: Tensor, fits: Tensor
    ) -> None:
        """Report losses; computed even where nobody collects them, as recomputation wants the same
        tensors again.
        """
        shape = self.shape
        balance = shape.num_experts * (is_first.float().mean(0) * probabilities.mean(0)).sum()
        loss = shape.balance_loss * balance
        if shape.z_loss:
            loss = loss + shape.z_loss * logits.logsumexp(-1).square().mean()
        found = _collected.get()
        if found is not None:
            found.append(Routing(loss, balance.detach(), 1.0 - fits.float().mean()))
