"""Schedules of the learning rate that DeepSpeed lacks, or has with an error: its WarmupCosineLR
spends the first step at rate zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from framework.config.optimizer import WSD, Constant, Cosine, InverseSqrt, Linear, Polynomial
from framework.errors import ConfigError
from framework.plan.plan import Plan
from framework.plan.render import schedule_steps

LR_RATIO: Final = "lr_ratio"
"""Key of a parameter group with a learning rate of its own: the rate as a share of the
optimizer's.
"""
MakeSchedule = Callable[[torch.optim.Optimizer], Any]
"""The user's schedule, with the interface of torch's LRScheduler."""
# Keys of a parameter group that a schedule may set.
_MOVED: Final = ("lr", "momentum", "betas", "weight_decay")


def factor(schedule: Constant | InverseSqrt, step: int, total_steps: int) -> float:
    """Return the share of the learning rate at a step counted from 0: (t + 1) / W while warming up,
    then by kind.

    W is the steps of warm-up, m `min_ratio`, k `power`, p the share of the steps after the warm-up
    that is over: cosine m + (1 - m) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, eq. 5),
    polynomial m + (1 - m) (1 - p)^k, linear with k = 1, inverse_sqrt sqrt(W / (t + 1)) (Vaswani et
    al. 2017, eq. 3); wsd 1 until the last `decay_steps`, over which p counts then (Haegele et al.
    2024).
    """
    warmup = schedule.num_warmup_steps(total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(schedule, InverseSqrt):
        return math.sqrt(warmup / (step + 1))
    first = warmup
    if isinstance(schedule, WSD):
        first = total_steps - schedule.decay_steps
    length = max(1, total_steps - first)
    progress = min(1.0, max(0.0, (step - first) / length))
    if isinstance(schedule, Cosine):
        cycle_progress = 1.0
        if progress < 1.0:
            # the remainder of integers, so that rounding moves no begin of a cycle
            cycle_progress = (step - first) * schedule.cycles % length / length
        left = _half_cosine(cycle_progress)
    elif isinstance(schedule, Linear):
        left = 1.0 - progress
    elif isinstance(schedule, Polynomial):
        left = (1.0 - progress) ** schedule.power
    elif isinstance(schedule, WSD):
        curves = {
            "linear": 1.0 - progress,
            "sqrt": 1.0 - math.sqrt(progress),
            "cosine": _half_cosine(progress),
        }
        left = curves[schedule.curve]
    else:
        return 1.0
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * left


def _half_cosine(progress: float) -> float:
    return (1.0 + math.cos(math.pi * progress)) / 2.0


class StepSchedule:
    """Sets the rate of every parameter group; has the methods that DeepSpeed calls on a client
    schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, factor: Callable[[int], float]) -> None:
        self.optimizer = optimizer
        self._factor = factor
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._go_to(0)

    def step(self) -> None:
        self._go_to(self._step + 1)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._go_to(int(state["step"]))

    def _go_to(self, step: int) -> None:
        self._step = step
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * self._factor(step)


class OwnSchedule:
    """A schedule of the user's own, saved with the values that it has set in the parameter groups:
    most of torch's schedules compute the next value from the last one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, make: MakeSchedule) -> None:
        self.optimizer = optimizer
        self._schedule = make(optimizer)
        self.step = self._schedule.step
        self.get_last_lr = self._schedule.get_last_lr
        self.get_lr = self.get_last_lr

    def state_dict(self) -> dict[str, Any]:
        moved = []
        for group in self.optimizer.param_groups:
            moved.append({name: group[name] for name in _MOVED if name in group})
        return {"schedule": self._schedule.state_dict(), "groups": moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ConfigError: kind ``schedule-groups``: another number of groups was saved.
        """
        groups = self.optimizer.param_groups
        saved_groups = state["groups"]
        if len(saved_groups) != len(groups):
            reason = f"{len(saved_groups)} parameter groups were saved, here are {len(groups)}"
            fix = "resume with the groups of the save"
            raise ConfigError.of("schedule-groups", reason, fix, "scheduler")
        self._schedule.load_state_dict(state["schedule"])
        for group, saved in zip(self.optimizer.param_groups, saved_groups, strict=True):
            for name, value in saved.items():
                group[name] = tuple(value) if name == "betas" else value


def client_schedule(
    plan: Plan, make: MakeSchedule | None
) -> Callable[[torch.optim.Optimizer], StepSchedule | OwnSchedule] | None:
    """Return the argument of `deepspeed.initialize(lr_scheduler=...)`; None if the JSON names the
    schedule, and if the rate is constant. `make` makes the user's own schedule.
    """
    schedule = plan.config.scheduler
    if make is not None:
        return partial(OwnSchedule, make=make)
    if not isinstance(schedule, (Constant, InverseSqrt)) or schedule == Constant():
        return None
    total_steps = 0
    is_of_the_length = getattr(schedule, "warmup_ratio", None) is not None
    if is_of_the_length or "total_steps" in type(schedule).model_fields:
        total_steps = schedule_steps(plan)
    return partial(StepSchedule, factor=partial(factor, schedule, total_steps=total_steps))
