"""Optimizers that DeepSpeed has for GPUs alone, in plain PyTorch, from their papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    weight_decay: float = 0.0,
    bounds: tuple[float, float] = (0.01, 10.0),
    bias_correction: bool = True,
    packed: Sequence[Tensor] = (),
) -> ByFormula:
    """LAMB (You et al. 2020) as DeepSpeed's kernel has it: the rate takes the correction of bias,
    and the norm is that of the update without it (tests/engine/test_lamb.py holds both against each
    other). The weights of several experts, `packed` one after the other, have each their ratio.
    """
    of_experts = {id(weight) for weight in packed}

    def update(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        num_parts = len(weight) if id(weight) in of_experts else 1
        values = {"mean": gradient, "square": gradient**2}
        for beta, (name, value) in zip(betas, values.items(), strict=True):
            state[name] = beta * state.get(name, torch.zeros_like(weight)) + (1 - beta) * value
        direction = state["mean"] / (state["square"].sqrt() + eps) + weight_decay * weight
        parts = direction.reshape(num_parts, -1)
        norms = weight.reshape(num_parts, -1).norm(dim=1), parts.norm(dim=1)
        ratio = (norms[0] / norms[1]).clamp(*bounds)
        ratio[(norms[0] == 0) | (norms[1] == 0)] = 1.0
        rate = lr
        if bias_correction:
            rate *= (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
        return -rate * (ratio[:, None] * parts).view_as(weight)

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
