"""Optimizers that a run config names and the framework makes, because DeepSpeed has none of them
or none for the device.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from framework.config.optimizer import Adafactor, AdamW8bit, Constant, Lamb, Lion, ScheduleFree
from framework.plan.plan import Plan
from framework.plan.render import schedule_steps

if TYPE_CHECKING:
    from framework.engine.initialize import MakeOptimizer


def own_optimizer(plan: Plan) -> MakeOptimizer:
    """Return what makes the optimizer of a plan from weights or groups of them, where
    `framework.plan.render.is_made_here`.
    """
    section = plan.config.optimizer
    if isinstance(section, Adafactor):
        from framework.engine import adafactor_shares

        least_gradient, least_weight = section.eps
        return partial(
            adafactor_shares.AdafactorOfShares,
            lr=section.lr,
            beta2_decay=section.beta2_decay,
            eps=(least_gradient, least_weight),
            d=section.d,
            weight_decay=section.weight_decay,
        )
    assert isinstance(section, Lion | AdamW8bit | ScheduleFree | Lamb)
    settings: dict[str, Any] = {
        "lr": section.lr,
        "betas": tuple(section.betas),
        "weight_decay": section.weight_decay,
    }
    if isinstance(section, Lion):
        from framework.engine import lion

        return partial(lion.Lion, **settings)
    settings["eps"] = section.eps
    if isinstance(section, Lamb):
        from framework.engine import lamb

        settings["max_coeff"] = section.max_coeff
        settings["min_coeff"] = section.min_coeff
        return partial(lamb.Lamb, **settings, bias_correction=section.bias_correction)
    if isinstance(section, AdamW8bit):
        from framework.engine import adam_8bit

        return partial(adam_8bit.AdamW8bit, **settings)
    from framework.engine import schedule_free

    scheduler = plan.config.scheduler
    warmup_steps = getattr(scheduler, "warmup_steps", 0)
    if isinstance(scheduler, Constant) and scheduler.warmup_ratio is not None:
        warmup_steps = scheduler.num_warmup_steps(schedule_steps(plan))
    return partial(schedule_free.ScheduleFreeAdamW, **settings, warmup_steps=warmup_steps)
