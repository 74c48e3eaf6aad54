"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682, algorithm 1), and evaluation with its
averaged weights.

Three sequences belong to a run: gradients are taken at y, which are the model's weights in
training; z takes AdamW's steps; and x, the average of z, is what the run is for. y lies between
the two: y = (1 - beta) z + beta x. y and z are kept, as the stepped weights and in the optimizer's
state, and x follows from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from framework.checkpoint.state.optimizer_shards import OptimizerViews
from framework.checkpoint.state.schedule_free import AHEAD_KEY, averaged
from framework.checkpoint.state.weight_names import opened
from framework.engine.weight_by_weight import WeightByWeight


class ScheduleFreeAdamW(WeightByWeight):
    """Schedule-free AdamW at the rate of its groups, which rises over `warmup_steps` and then
    stays.

    The share that a step has in the average is the square of its rate over the sum of squares so
    far. With such a rate it depends on the count of steps alone, so that no further number is kept.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        warmup_steps: int,
    ) -> None:
        """Take weights, or groups of them.

        Args:
            params: the weights.
            lr: learning rate.
            betas: share of the average in y; decay of the running mean of squares.
            eps: added to the root of that mean.
            weight_decay: pull of y towards zero.
            warmup_steps: steps in which the rate rises in equal parts.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._warmup_steps = warmup_steps

    def _step_weight(
        self, weight: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        state = self.state[weight]
        if "step" not in state:
            state["step"] = torch.zeros(())
            state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state[AHEAD_KEY] = weight.detach().clone(memory_format=torch.preserve_format)
        state["step"] += 1
        steps = int(state["step"])
        share = share_in_average(steps, self._warmup_steps)
        beta, second_beta = group["betas"]
        rate = group["lr"]
        squares = state["exp_avg_sq"]
        squares.lerp_(gradient.square(), 1 - second_beta)
        root = (squares / (1 - second_beta**steps)).sqrt_().add_(group["eps"])
        direction = torch.div(gradient, root, out=root)
        if group["weight_decay"]:
            direction.add_(weight, alpha=group["weight_decay"])
        ahead = state[AHEAD_KEY]
        weight.lerp_(ahead, share)
        weight.add_(direction, alpha=rate * (beta * (1 - share) - 1))
        ahead.sub_(direction, alpha=rate)


def share_in_average(steps: int, warmup_steps: int) -> float:
    """Return the share of step number `steps`, from 1, in the average: the square of its rate over
    the sum of squares up to it.
    """
    if steps <= warmup_steps:
        return 6 * steps / ((steps + 1) * (2 * steps + 1))
    of_warmup = 0.0  # sum of squares over the square of the full rate
    if warmup_steps:
        of_warmup = (warmup_steps + 1) * (2 * warmup_steps + 1) / (6 * warmup_steps)
    return 1 / (of_warmup + steps - warmup_steps)


class AveragedWeights:
    """Lets one engine's model compute with x while it is measured."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        *,
        beta: float,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Take the engine and the share of x in y. `before` is called before weights are
        changed.
        """
        self._engine = engine
        self._beta = beta
        self._before = before
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Have the model compute with x within the block, and with the same bits of y after it;
        a rank's share of the weights is there twice meanwhile. Collective.

        After an error the weights are not put back: that is collective as well, and the other ranks
        are elsewhere.
        """
        self._before()
        in_training: dict[torch.Tensor, torch.Tensor] = {}
        views = OptimizerViews(self._engine, {})
        with opened(self._engine.optimizer):
            for weight, state in self._base.state.items():
                if AHEAD_KEY in state and state[AHEAD_KEY].numel():  # of those on NVMe it is empty
                    in_training[weight] = weight.data
                    weight.data = averaged(weight.data, state[AHEAD_KEY], beta=self._beta)
            views.spread_weights(self._average)
        yield
        with opened(self._engine.optimizer):
            for weight, values in in_training.items():
                weight.data = values
            views.spread_weights()

    def _average(self, weight: torch.Tensor) -> None:
        """Write x into y, in memory."""
        state = self._base.state[weight]
        if AHEAD_KEY in state:
            weight.data.copy_(averaged(weight.data, state[AHEAD_KEY], beta=self._beta))
