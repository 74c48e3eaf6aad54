"""The cosine schedule. DeepSpeed's own WarmupCosineLR spends the first step at learning rate zero; this one does
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from framework.config.scheduler import Cosine
from framework.plan.plan import Plan
from framework.plan.render import schedule_steps


def cosine_factor(step: int, *, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Share of the learning rate at a step counted from 0: (t + 1) / W while warming up, then
    m + (1 - m) (1 + cos(pi (t - W) / (T - W))) / 2 (Loshchilov & Hutter 2017, eq. 5, without restarts)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_ratio + (1.0 - min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


class CosineSchedule:
    """Sets the rate of every parameter group; has the methods that DeepSpeed calls on a client schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, factor: Callable[[int], float]) -> None:
        self.optimizer = optimizer
        self._factor = factor
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0
        self._apply()

    def step(self) -> None:
        """An optimizer step was taken."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Learning rate of every group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """Position in the schedule."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * self._factor(self._step)


def client_schedule(plan: Plan) -> Callable[[torch.optim.Optimizer], CosineSchedule] | None:
    """What `deepspeed.initialize(lr_scheduler=...)` gets; None where the JSON names the schedule."""
    scheduler = plan.config.scheduler
    if not isinstance(scheduler, Cosine):
        return None
    total = schedule_steps(plan)

    def factor(step: int) -> float:
        return cosine_factor(
            step, warmup_steps=scheduler.warmup_steps, total_steps=total, min_ratio=scheduler.min_ratio
        )

    return lambda optimizer: CosineSchedule(optimizer, factor=factor)
