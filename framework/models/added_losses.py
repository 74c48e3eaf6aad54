"""Losses that layers of a model add to the task's, as mixtures of experts do, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function


class AddsLosses(nn.Module):
    """A layer that calls `add_losses` in its forward pass. Its losses are means over the
    micro-batch.

    Attributes:
        weight: returns the weight of its losses in the backward pass of its outputs, where no loss
            of this process is there to add them to: in a stage of a pipeline. None: they are added
            to the task's loss.
    """

    weight: Callable[[], float] | None = None

    def add(self, outputs: Tensor, routing: Routing) -> Tensor:
        """Add the losses of a pass, or let the backward pass of `outputs` be theirs as well.

        Returns:
            The outputs, to be returned in their place.
        """
        if self.weight is None:
            add_losses(routing)
            return outputs
        add_losses(routing._replace(loss=routing.loss.detach()))
        attached: Tensor = _Attach.apply(outputs, routing.loss, self.weight)
        return attached


class _Attach(Function):
    """Passes a tensor on, and gives a loss beside it the gradient that `weight` returns."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, weight: Callable[[], float]) -> Tensor:
        ctx.weight = weight
        ctx.like = loss.dtype, loss.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dtype, device = ctx.like
        return gradient, torch.full((), ctx.weight(), dtype=dtype, device=device), None


class Routing(NamedTuple):
    """Loss and metrics of a mixture for one micro-batch, 0-d float32 tensors.

    Attributes:
        loss: the mixture's weighted losses, to be added to the task's loss; differentiable.
        balance: the balance loss alone, detached; 1 if all experts get equally many tokens.
        dropped: share of the choices that found no room.
    """

    loss: Tensor
    balance: Tensor
    dropped: Tensor


_collected: ContextVar[list[Routing] | None] = ContextVar("collected", default=None)


@contextmanager
def collected_routings() -> Iterator[list[Routing]]:
    """Collect the `Routing` of each mixture that runs within the block.

    Recomputation in the backward pass adds nothing.
    """
    routings: list[Routing] = []
    token = _collected.set(routings)
    try:
        yield routings
    finally:
        _collected.reset(token)


def add_losses(routing: Routing) -> None:
    """Append a routing to those that are collected, if any are."""
    routings = _collected.get()
    in_backward = torch._C._current_graph_task_id() != -1
    if routings is not None and not in_backward:
        routings.append(routing)


def router_balance(outputs: Any, model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return `Routing.balance` and `Routing.dropped` of a model of transformers that returns its
    router's logits (`output_router_logits`); None for any other. Its `aux_loss` is the number of
    chosen experts where tokens spread evenly (transformers, `load_balancing_loss_func`), and its
    experts have room for all tokens.
    """
    loss = getattr(outputs, "aux_loss", None)
    choices = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    has_logits = getattr(outputs, "router_logits", None) is not None
    if not isinstance(loss, Tensor) or not has_logits or not choices:
        return None
    return loss.detach() / choices, loss.new_zeros(())


def routing_metrics(reported: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the means over the pairs (`Routing.balance`, `Routing.dropped`) of a step; empty if
    there are none. It waits for the device.
    """
    if not reported:
        return {}
    balance, dropped = torch.stack([torch.stack(pair) for pair in reported]).mean(0).tolist()
    return {"train/balance_loss": balance, "train/dropped_tokens": dropped}
