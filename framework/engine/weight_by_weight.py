"""Base of optimizers of our own that step one weight after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class WeightByWeight(torch.optim.Optimizer):
    """An optimizer whose step of a weight depends on that weight, its gradient and its group."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_weight(weight, weight.grad, group)

    def _step_weight(
        self, weight: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        """Step one weight by its gradient, of its shape, with the settings of its group."""
        raise NotImplementedError
