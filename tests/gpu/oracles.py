"""Optimizers that DeepSpeed has for GPUs alone, in plain PyTorch, from their papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class ByFormula(torch.optim.Optimizer):
    """An optimizer whose step is one formula, for each weight by itself."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        update: Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor],
    ):
        super().__init__(weights, {"lr": 0.0})
        self._update, self._steps = update, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step."""
        self._steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight += self._update(weight, weight.grad, self.state[weight], self._steps)


def lamb(
    weights: Iterable[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> ByFormula:
    """LAMB (You et al. 2020, algorithm 2) without weight decay; ratios between 0.01 and 10, as
    DeepSpeed has it.
    """

    def update(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        for name, beta, value in zip(
            ("mean", "square"), betas, (gradient, gradient**2), strict=True
        ):
            state[name] = beta * state.get(name, torch.zeros_like(weight)) + (1 - beta) * value
        mean, square = (
            state[name] / (1 - beta**step)
            for name, beta in zip(("mean", "square"), betas, strict=True)
        )
        direction = mean / (square.sqrt() + eps)
        norms = weight.norm(), direction.norm()
        ratio = (norms[0] / norms[1]).clamp(0.01, 10.0) if min(norms) > 0 else torch.ones(())
        return -lr * ratio * direction

    return ByFormula(weights, update)


def lion(
    weights: Iterable[Tensor], *, lr: float, betas: tuple[float, float] = (0.9, 0.99)
) -> ByFormula:
    """Lion (Chen et al. 2023, algorithm 2) without weight decay."""

    def update(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        mean = state.get("mean", torch.zeros_like(weight))
        state["mean"] = betas[1] * mean + (1 - betas[1]) * gradient
        return -lr * (betas[0] * mean + (1 - betas[0]) * gradient).sign()

    return ByFormula(weights, update)
