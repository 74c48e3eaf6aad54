"""Losses that layers of a model add to the task's, as mixtures of experts do, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn


class AddsLosses(nn.Module):
    """A layer that calls `add_losses` in its forward pass. Its losses are means over the
    micro-batch.
    """


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

    Recomputation in the backward pass runs after the block, and adds nothing.
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
    if routings is not None:
        routings.append(routing)


def routing_metrics(reported: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the means over the pairs (`Routing.balance`, `Routing.dropped`) of a step; empty if
    there are none. It waits for the device.
    """
    if not reported:
        return {}
    balance, dropped = torch.stack([torch.stack(pair) for pair in reported]).mean(0).tolist()
    return {"train/balance_loss": balance, "train/dropped_tokens": dropped}
