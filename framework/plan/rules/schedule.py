"""Rules about the learning rate over steps, and about keys in steps and in epochs that contradict
each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from framework.config.load import Source
from framework.config.optimizer import (
    WSD,
    Constant,
    Lamb,
    OneCycle,
    OptimizerKind,
    WarmupLR,
    optimizer_lr,
)
from framework.config.run_config import RunConfig
from framework.config.training import Profile
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule


@rule()
def schedule_needs_lr(config: RunConfig, cluster: Cluster) -> Found:
    """Find a schedule without a rate: DeepSpeed's WarmupDecayLR ends its warm-up at 0.001 for every
    optimizer, so the rate must be in the config.
    """
    scheduler = config.scheduler
    if not isinstance(scheduler, WarmupLR):
        return
    if scheduler.max_lr is None and optimizer_lr(config.optimizer) is None:
        reason = (
            f"the {scheduler.kind} schedule needs the optimizer's learning rate, which is "
            "not in the config"
        )
        yield Problem("lr-unknown", reason, "set it here, or optimizer.args.lr", "scheduler.max_lr")


@rule("warmup-too-long")
def warmup_fits(config: RunConfig, cluster: Cluster) -> Found:
    """Find a warm-up as long as the schedule: it never reaches the learning rate of the config."""
    total = getattr(config.scheduler, "total_steps", None)
    if total is None:
        return
    key, needed = _fixed_steps(config, total)
    if needed >= total:
        fix = "make it shorter, or leave total_steps out"
        yield f"scheduler.{key}", f"the whole schedule has {total} steps", fix


@rule("section-clash")
def one_warmup(config: RunConfig, cluster: Cluster) -> Found:
    """Find a warm-up that is given as steps and as a share of them."""
    scheduler = config.scheduler
    if getattr(scheduler, "warmup_ratio", None) is None:
        return
    if "warmup_steps" in scheduler.model_fields_set:
        reason = f"scheduler.warmup_steps = {getattr(scheduler, 'warmup_steps', 0)} gives it too"
        yield "scheduler.warmup_ratio", reason, "keep one of the two"


def _fixed_steps(config: RunConfig, total_steps: int) -> tuple[str, int]:
    """Return the key of the schedule's last fixed part, and the steps of all of them in one of
    `total_steps`; a schedule may be no shorter.
    """
    scheduler = config.scheduler
    warmup = getattr(scheduler, "warmup_steps", 0)
    if isinstance(scheduler, Constant):
        warmup = scheduler.num_warmup_steps(total_steps)
    if isinstance(scheduler, WSD):
        return "decay_steps", warmup + scheduler.decay_steps - 1
    return "warmup_steps", warmup


@rule("upside-down")
def bounds_in_order(config: RunConfig, cluster: Cluster) -> Found:
    """Find a lower bound above its upper one: DeepSpeed does not exchange the ends of a cycle, and
    between LAMB's bounds there would be no ratio.
    """
    for lower, upper in _bounds(config):
        highest = attrgetter(upper)(config)
        if attrgetter(lower)(config) > highest:
            yield lower, f"it is above {upper} = {highest}", "exchange the two"


def _bounds(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of each lower bound and of its upper one."""
    cycle = config.scheduler
    if isinstance(cycle, OneCycle):
        yield "scheduler.min_lr", "scheduler.max_lr"
        if cycle.cycle_momentum:
            yield "scheduler.min_momentum", "scheduler.max_momentum"
    if isinstance(config.optimizer, Lamb):
        yield "optimizer.min_coeff", "optimizer.max_coeff"


@rule("overruled-key", "warning")
def cycled_momentum(config: RunConfig, cluster: Cluster) -> Found:
    """Find a cycle of momentum without betas to move, and betas that it sets: DeepSpeed's OneCycle
    knows no `momentum`, and sets the second beta to 0.99 (`_initialize_momentum`).
    """
    cycle = config.scheduler
    optimizer = config.optimizer
    if not isinstance(cycle, OneCycle) or not cycle.cycle_momentum:
        return
    if not isinstance(optimizer, OptimizerKind):
        return
    if not hasattr(optimizer, "betas"):
        reason = (
            f"DeepSpeed's OneCycle moves betas, which {optimizer.kind} has not: this is ignored"
        )
        yield "scheduler.cycle_momentum", reason, "set scheduler.cycle_momentum: false"
    elif "betas" in optimizer.model_fields_set:
        reason = "scheduler.cycle_momentum moves the first one and sets the second to 0.99"
        yield "optimizer.betas", reason, "keep one of the two"


@rule("profile-range")
def profile_steps(config: RunConfig, cluster: Cluster) -> Found:
    """Find profiles without steps, and measurements that `deepspeed` requests as well."""
    profile = config.profile
    if profile is None:
        return
    yield from _range_without_steps(profile)
    for name, deepspeed_name in _INSTRUMENTS.items():
        value = config.deepspeed.get(deepspeed_name)
        if getattr(profile, name) and value:
            reason = f"profile.{name} has DeepSpeed measure it in one step, and this in all"
            yield Problem(
                "section-clash",
                reason,
                f"remove it here, or profile.{name}",
                f"deepspeed.{deepspeed_name}",
                value,
            )


def _range_without_steps(profile: Profile) -> Found:
    """Find a range of steps that leaves none to be traced."""
    first = profile.first
    last = profile.last
    if first > last:
        yield "profile.steps", "it ends before it begins", f"write {last}-{first}"
    elif profile.waits and first == last:
        reason = (
            "what waits for every operation has the last step for itself, and none is left "
            "to be traced"
        )
        yield "profile.steps", reason, f"write {first}-{first + 1}"


# Key of `profile` -> DeepSpeed's key that measures the same in every step.
_INSTRUMENTS: Final = {"deepspeed_timers": "wall_clock_breakdown", "communication": "comms_logger"}


def length_for_schedule(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """Find a run that ends on the way up, before the rate is down again, or before the profiled
    steps.
    """
    scheduler = config.scheduler
    if not total_steps:
        return
    key, needed = _fixed_steps(config, total_steps)
    if config.profile is not None:
        yield from _length_for_profile(config.profile, total_steps)
    if isinstance(scheduler, OneCycle):
        yield from _length_for_cycle(scheduler, total_steps)
    elif getattr(scheduler, "total_steps", None) is None and needed >= total_steps:
        reason = f"the run has {total_steps} steps and never reaches the full learning rate"
        value = getattr(scheduler, key)
        yield Problem(
            "warmup-too-long",
            reason,
            "make it shorter",
            f"scheduler.{key}",
            value,
            severity="warning",
        )


def _length_for_profile(profile: Profile, total_steps: int) -> Iterator[Problem]:
    """Find a run that ends before the profiled steps."""
    if profile.last <= total_steps:
        return
    missed = "them" if profile.first > total_steps else "the last of them"
    reason = f"the run has {total_steps} steps and never reaches {missed}"
    fix = f"profile steps up to {total_steps}"
    yield Problem(
        "profile-beyond-run", reason, fix, "profile.steps", profile.steps, severity="warning"
    )


def _length_for_cycle(cycle: OneCycle, total_steps: int) -> Iterator[Problem]:
    """Find a run that ends before its cycle."""
    run = f"the run has {total_steps} steps"
    first = cycle.first_steps
    cycle_steps = first + (cycle.second_steps or first)
    if cycle_steps <= total_steps:
        return
    fix = f"set scheduler.first_steps: {max(1, total_steps // 2)}"
    if first >= total_steps:
        reason = f"{run} and never reaches max_lr"
    else:
        reason = f"up and down take {cycle_steps} steps and {run}: it ends before the rate is down"
        fix += ", or second_steps"
    yield Problem("cycle-too-long", reason, fix, "scheduler.first_steps", first, severity="warning")


def overruled(config: RunConfig, source: Source) -> Iterator[Problem]:
    """Find pairs of keys that set the same in steps and in epochs: one of them wins.

    It is an error if the command line sets the other one, a warning if a file has both.
    `training.max_steps=10` over a file's `max_epochs` is how a short trial is made, and no problem.
    """
    for name, verb in (("training", "max"), ("evaluation", "every"), ("checkpoint", "every")):
        wins = f"{verb}_steps"
        loses = f"{verb}_epochs"
        winner = getattr(getattr(config, name), wins)
        loser = getattr(getattr(config, name), loses)
        if winner is None or loser is None:
            continue
        key = f"{name}.{loses}"
        reason = f"{name}.{wins} is {winner} and wins, so that this"
        if source.is_override((name, loses)):
            fix = f"add {name}.{wins}=null, or change that one instead"
            yield Problem("overruled-key", f"{reason} would be ignored", fix, key, loser)
        elif not source.is_override((name, wins)):
            reason = f"{reason} is ignored"
            yield Problem(
                "overruled-key", reason, "keep one of the two", key, loser, severity="warning"
            )
