"""Rules about the learning rate over steps, and about keys in steps and in epochs that contradict each other.

Rules about the learning rate over steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.config.load import Source
from framework.config.optimizer import OneCycle, WarmupLR, optimizer_lr
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster


def cycle_order(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed takes the ends as they come: the cycle would go down first, and begin at the rate that was meant as its
    top.
    """
    cycle = config.scheduler
    if not isinstance(cycle, OneCycle):
        return
    if cycle.min_lr > cycle.max_lr:
        yield Problem(
            kind="cycle-upside-down",
            key="scheduler.min_lr",
            value=cycle.min_lr,
            reason=f"it is above scheduler.max_lr = {cycle.max_lr}",
            fix="exchange the two",
        )
    if cycle.cycle_momentum and cycle.min_momentum > cycle.max_momentum:
        yield Problem(
            kind="cycle-upside-down",
            key="scheduler.min_momentum",
            value=cycle.min_momentum,
            reason=f"it is above scheduler.max_momentum = {cycle.max_momentum}",
            fix="exchange the two",
        )


def schedule_needs_lr(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed's WarmupDecayLR ends its warm-up at 0.001 whatever the optimizer says, so we must know the rate."""
    scheduler, optimizer = config.scheduler, config.optimizer
    if isinstance(scheduler, WarmupLR) and scheduler.max_lr is None and optimizer_lr(optimizer) is None:
        yield Problem(
            kind="lr-unknown",
            key="scheduler.max_lr",
            reason=f"the {scheduler.kind} schedule needs the optimizer's learning rate, which is not in the config",
            fix="set it here, or optimizer.args.lr",
        )


def warmup_fits(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A warm-up as long as the schedule never reaches the learning rate that was asked for."""
    warmup, total = getattr(config.scheduler, "warmup_steps", 0), getattr(config.scheduler, "total_steps", None)
    if total is not None and warmup >= total:
        yield Problem(
            kind="warmup-too-long",
            key="scheduler.warmup_steps",
            value=warmup,
            reason=f"the whole schedule has {total} steps",
            fix="make it shorter, or leave total_steps out",
        )


def length_for_schedule(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """A run that ends on the way up, or before the rate is down again."""
    scheduler = config.scheduler
    if not total_steps:
        return
    if isinstance(scheduler, OneCycle):
        yield from _length_for_cycle(scheduler, total_steps)
        return
    warmup = getattr(scheduler, "warmup_steps", 0)
    if getattr(scheduler, "total_steps", None) is None and warmup >= total_steps:
        yield Problem(
            kind="warmup-too-long",
            key="scheduler.warmup_steps",
            value=warmup,
            severity="warning",
            reason=f"the run has {total_steps} steps and never reaches the full learning rate",
            fix="make it shorter",
        )


def _length_for_cycle(cycle: OneCycle, total_steps: int) -> Iterator[Problem]:
    whole = cycle.first_steps + (cycle.second_steps or cycle.first_steps)
    half = f"set scheduler.first_steps: {max(1, total_steps // 2)}"
    if cycle.first_steps >= total_steps:
        yield Problem(
            kind="cycle-too-long",
            key="scheduler.first_steps",
            value=cycle.first_steps,
            severity="warning",
            reason=f"the run has {total_steps} steps and never reaches max_lr",
            fix=half,
        )
    elif whole > total_steps:
        yield Problem(
            kind="cycle-too-long",
            key="scheduler.first_steps",
            value=cycle.first_steps,
            severity="warning",
            reason=f"up and down take {whole} steps and the run has {total_steps}: it ends before the rate is down",
            fix=f"{half}, or second_steps",
        )


# Two keys of a section that say the same in steps and in epochs: one of them wins, and nobody may lose in silence.


# Section -> (the key that wins, the key that is then ignored).
_PAIRS: Final = {
    "training": ("max_steps", "max_epochs"),
    "evaluation": ("every_steps", "every_epochs"),
    "checkpoint": ("every_steps", "every_epochs"),
}


def overruled(config: RunConfig, source: Source) -> Iterator[Problem]:
    """An error where the command line asks for what the other key overrules, a warning where a file has both.

    `training.max_steps=10` over a file's `max_epochs` is how a short trial is made: nothing is said of that.
    """
    for name, (wins, loses) in _PAIRS.items():
        section = getattr(config, name)
        winner, loser = getattr(section, wins), getattr(section, loses)
        if winner is None or loser is None:
            continue
        is_asked, wins_by_command = source.is_override((name, loses)), source.is_override((name, wins))
        reason = f"{name}.{wins} is {winner} and wins, so that this would be ignored"
        if is_asked:
            fix = f"add {name}.{wins}=null, or change that one instead"
            yield Problem(kind="overruled-key", key=f"{name}.{loses}", value=loser, reason=reason, fix=fix)
        elif not wins_by_command:
            yield Problem(
                kind="overruled-key",
                key=f"{name}.{loses}",
                value=loser,
                reason=reason.replace("would be", "is"),
                fix="keep one of the two",
                severity="warning",
            )
