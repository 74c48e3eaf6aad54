"""Lion in torch's own operations, for devices that DeepSpeed has no kernel of it for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from framework.engine.weight_by_weight import WeightByWeight


class Lion(WeightByWeight):
    """Lion (Chen et al. 2023, algorithm 2): a step of one size for all numbers, in the direction
    of the sign of an interpolation between the gradient and its running mean.

    It keeps what DeepSpeed's kernels keep, under the same key, so that a run may go on with either.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """Take weights, or groups of them.

        Args:
            params: the weights.
            lr: size of a step.
            betas: share of the mean in the direction, and share of the old mean that stays.
            weight_decay: decoupled, as AdamW's.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_weight(
        self, weight: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        state = self.state[weight]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        mean = state["exp_avg"]
        first_beta, second_beta = group["betas"]
        direction = torch.lerp(mean, gradient, 1 - first_beta).sign_()
        if group["weight_decay"]:
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"])
        mean.lerp_(gradient, 1 - second_beta)
