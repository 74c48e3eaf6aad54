"""The scheduler section, with the optimizer it drives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import error, holds, warning
from framework.errors import Problem
from framework.text.typos import nearest

# deepspeed/runtime/lr_schedules.py `VALID_LR_SCHEDULES`.
DEEPSPEED_SCHEDULES: Final = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# Classes of torch.optim.lr_scheduler.
TORCH_SCHEDULES: Final = frozenset(
    {
        "ChainedScheduler",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LambdaLR",
        "LinearLR",
        "MultiStepLR",
        "MultiplicativeLR",
        "OneCycleLR",
        "PolynomialLR",
        "ReduceLROnPlateau",
        "SequentialLR",
        "StepLR",
    }
)
_FROM_CODE: Final = frozenset({"ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR"})
_WARMUPS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_WARMUP_STEPS: Final = 1000  # warmup_num_steps when left out


def scheduler_known(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_scheduler_from_config`: "DeepSpeed does not recognize LR scheduler"; case
    matters.
    """
    name = facts.text("scheduler.type")
    if name and name not in DEEPSPEED_SCHEDULES and name not in TORCH_SCHEDULES:
        guess = nearest(name, DEEPSPEED_SCHEDULES) or "WarmupLR"
        yield error(
            facts,
            "scheduler-unknown",
            "scheduler.type",
            "neither DeepSpeed nor torch has such a schedule",
            f'set scheduler.type: "{guess}"',
        )


def schedule_from_code(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_scheduler_from_config` hands on what the file has: no JSON value is a function."""
    name = facts.text("scheduler.type")
    if name in _FROM_CODE and facts.stage == 0 and facts.model_dtype == "fp32":
        yield error(
            facts,
            "scheduler-from-code",
            "scheduler.type",
            "it needs functions or schedules that only Python can give",
            "pass lr_scheduler= to deepspeed.initialize, or use one of " + ", ".join(DEEPSPEED_SCHEDULES),
        )


def torch_schedule_of_a_wrapper(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_scheduler_from_config` hands torch's schedule the wrapped optimizer: a
    TypeError.
    """
    wrapped = facts.stage in (1, 2, 3) or facts.model_dtype in ("fp16", "bf16")
    if facts.text("scheduler.type") in TORCH_SCHEDULES and wrapped:
        where = f"ZeRO stage {facts.stage}" if facts.stage else str(facts.model_dtype)
        yield error(
            facts,
            "torch-scheduler-with-wrapper",
            "scheduler.type",
            f"torch's schedules refuse the optimizer that DeepSpeed wraps for {where}",
            "pass lr_scheduler= to deepspeed.initialize, or use one of " + ", ".join(DEEPSPEED_SCHEDULES),
        )


def plateau_without_a_metric(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_take_model_step` calls `step(train_batch_size)`: the batch size is the "metric"."""
    if facts.text("scheduler.type") == "ReduceLROnPlateau" and facts.stage == 0 and facts.model_dtype == "fp32":
        yield warning(
            facts,
            "plateau-without-metric",
            "scheduler.type",
            "DeepSpeed gives it the batch size as metric, which never improves: the rate collapses",
            "remove scheduler and step it in code with the metric",
        )


def warmup_decay_peak(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/lr_schedules.py `WarmupDecayLR`: warmup_max_lr is 0.001 whatever the optimizer says."""
    yield from _peak(facts, "WarmupDecayLR")


@holds(before="0.17.2")
def warmup_peak(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/lr_schedules.py `WarmupLR`: until 0.17.2 its warmup_max_lr was 0.001 as well."""
    yield from _peak(facts, "WarmupLR")


def _peak(facts: Facts, schedule: str) -> Iterator[Problem]:
    lr = facts.number("optimizer.params.lr", 0.001)
    known = facts.given("optimizer.params.lr") and lr is not None
    if facts.text("scheduler.type") != schedule or facts.given("scheduler.params.warmup_max_lr") or lr == 0.001:
        return
    if facts.given("scheduler.params") and facts.get("scheduler.params.warmup_max_lr", 0) is not None:
        kind = "warmup-decay-peak" if schedule == "WarmupDecayLR" else "warmup-peak"
        yield warning(
            facts,
            kind,
            "scheduler.params.warmup_max_lr",
            f"left out, {schedule} trains at 0.001" + (f", not at the optimizer's {lr}" if known else ""),
            f"set scheduler.params.warmup_max_lr: {lr if known else 0.001}",
        )


def warmup_never_ends(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/lr_schedules.py `WarmupDecayLR`, `WarmupCosineLR`: only a log line when the warm-up is as
    long.
    """
    total = facts.whole("scheduler.params.total_num_steps")
    warmup = facts.whole("scheduler.params.warmup_num_steps", _WARMUP_STEPS)
    if facts.text("scheduler.type") not in ("WarmupDecayLR", "WarmupCosineLR") or not total or not warmup:
        return
    if 1 < total <= warmup:
        default = "" if facts.given("scheduler.params.warmup_num_steps") else ", the default,"
        yield warning(
            facts,
            "warmup-too-long",
            "scheduler.params.total_num_steps",
            f"the warm-up of {warmup} steps{default} never reaches its peak in {total} steps",
            f"set scheduler.params.warmup_num_steps: {max(1, total // 10)}",
        )


def warmup_falls(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/lr_schedules.py `delta_lrs`: a peak below the first rate makes the warm-up fall."""
    kind, key = facts.text("scheduler.type"), "scheduler.params.warmup_min_lr"
    least = facts.number(key)
    lr = facts.number("optimizer.params.lr") if kind == "WarmupLR" else 0.001
    peak = facts.number("scheduler.params.warmup_max_lr", lr)
    if kind in ("WarmupLR", "WarmupDecayLR") and least is not None and peak is not None and least > peak >= 0:
        yield warning(facts, "warmup-falls", key, f"the warm-up falls from there to {peak}", f"set {key}: 0.0")


def warmup_of_no_steps(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/lr_schedules.py `WarmupLR`: "warmup_num_steps must be a positive integer"; until 0.19.3 it took
    2.
    """
    steps = facts.whole("scheduler.params.warmup_num_steps")
    if facts.text("scheduler.type") in _WARMUPS and steps is not None and steps < 1:
        report = error if facts.since("0.19.3") else warning
        reason = "a warm-up has one step at least" if report is error else "this release takes 2 instead"
        yield report(
            facts,
            "warmup-without-steps",
            "scheduler.params.warmup_num_steps",
            reason,
            "set scheduler.params.warmup_num_steps: 2",
        )
