"""Settings that a resumed run has otherwise than its checkpoint, by `checkpoint.allow_changed`:
the load of a checkpoint would bring the old values back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import deepspeed

from framework.engine.parameter_groups import plain_options
from framework.engine.schedules import StepSchedule

# Keys that decide the learning rate of a step, beside the scheduler's.
_OF_RATE: Final = ("optimizer.lr", "optimizer.adam_lr", "optimizer.args.lr")
_SCHEDULE: Final = "scheduler"
_RATES: Final = ("lr", "initial_lr")
# Entries of a parameter group that are no settings: a kernel of DeepSpeed counts its steps there.
_COUNTED: Final = ("params", "step")


@contextmanager
def keeping_changed(engine: deepspeed.DeepSpeedEngine, changed: Sequence[str]) -> Iterator[None]:
    """Load a checkpoint within this context, and the engine has its moments, weights and counts,
    with the settings that the engine was built with.

    If rates have changed, the schedule is stepped up to the place of the checkpoint.

    Args:
        engine: the engine that is filled in the context.
        changed: dotted keys of the config that the checkpoint has otherwise.
    """
    schedule = engine.lr_scheduler
    has_new_rates = any(key in _OF_RATE or key.startswith(_SCHEDULE) for key in changed)
    has_new_options = has_new_rates or any(key.startswith("optimizer.") for key in changed)
    kept = _COUNTED if has_new_rates else (*_COUNTED, *_RATES)
    built = plain_options(engine, left_out=kept)
    clipping = getattr(engine.optimizer, "clip_grad", None)
    if has_new_rates:
        engine.lr_scheduler = None  # its state would be of another schedule, or of other rates
    try:
        yield
    finally:
        engine.lr_scheduler = schedule
    if "training.clip_grad_norm" in changed and clipping is not None:
        engine.optimizer.clip_grad = clipping
    if has_new_options:
        for group, options in zip(engine.optimizer.param_groups, built, strict=True):
            group.update(options)
    if has_new_rates and schedule is not None:
        _advance(schedule, engine.global_steps - engine.skipped_steps)


def _advance(schedule: Any, num_steps: int) -> None:
    """Bring a schedule that has taken no step to its place after `num_steps` steps."""
    if isinstance(schedule, StepSchedule):
        schedule.load_state_dict({"step": num_steps})
    elif hasattr(schedule, "last_batch_iteration"):  # DeepSpeed's, which count from -1
        if num_steps:
            schedule.step(num_steps - 1)
    else:
        for _ in range(num_steps):
            schedule.step()
