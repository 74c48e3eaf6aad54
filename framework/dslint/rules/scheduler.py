"""The scheduler section, with the optimizer it drives."""

from __future__ import annotations

from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.parameters import SCHEDULERS
from framework.dslint.rules.base import Found, rule
from framework.text.typos import nearest

_WARMUPS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# deepspeed/runtime/lr_schedules.py `VALID_LR_SCHEDULES`.
DEEPSPEED_SCHEDULES: Final = ("LRRangeTest", "OneCycle", *_WARMUPS)
_FROM_CODE: Final = frozenset({"ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR"})
# Classes of torch.optim.lr_scheduler.
TORCH_SCHEDULES: Final = SCHEDULERS.keys() | _FROM_CODE
_WARMUP_STEPS: Final = 1000  # warmup_num_steps when left out
_TYPE: Final = "scheduler.type"
_STEPS: Final = "scheduler.params.warmup_num_steps"
_PEAK: Final = "scheduler.params.warmup_max_lr"
_ANOTHER: Final = f"pass lr_scheduler= to deepspeed.initialize, or use one of {', '.join(DEEPSPEED_SCHEDULES)}"


def _is_plain(facts: Facts) -> bool:
    """Check whether DeepSpeed leaves the optimizer as it is."""
    return facts.stage == 0 and facts.model_dtype == "fp32"


@rule()
def scheduler_unknown(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_scheduler_from_config`: "DeepSpeed does not recognize LR scheduler"; by case."""
    name = facts.text(_TYPE)
    if name and name not in DEEPSPEED_SCHEDULES and name not in TORCH_SCHEDULES:
        fix = f'set {_TYPE}: "{nearest(name, DEEPSPEED_SCHEDULES) or "WarmupLR"}"'
        yield _TYPE, "neither DeepSpeed nor torch has such a schedule", fix


@rule()
def scheduler_from_code(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_scheduler_from_config` hands on what the file has: no JSON value is a function."""
    if facts.text(_TYPE) in _FROM_CODE and _is_plain(facts):
        yield _TYPE, "it needs functions or schedules that only Python can give", _ANOTHER


@rule()
def torch_scheduler_with_wrapper(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_scheduler_from_config` hands torch's the wrapped optimizer: a TypeError."""
    wrapped = facts.stage or facts.model_dtype in ("fp16", "bf16")
    if facts.text(_TYPE) in TORCH_SCHEDULES and wrapped:
        where = f"ZeRO stage {facts.stage}" if facts.stage else str(facts.model_dtype)
        yield _TYPE, f"torch's schedules refuse the optimizer that DeepSpeed wraps for {where}", _ANOTHER


@rule("warning")
def plateau_without_metric(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_take_model_step` calls `step(train_batch_size)`: the batch size is the "metric"."""
    if facts.text(_TYPE) == "ReduceLROnPlateau" and _is_plain(facts):
        reason = "DeepSpeed gives it the batch size as metric, which never improves: the rate collapses"
        yield _TYPE, reason, "remove scheduler and step it in code with the metric"


@rule("warning")
def warmup_decay_peak(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupDecayLR`: warmup_max_lr is 0.001 whatever the optimizer says."""
    return _default_peak(facts, "WarmupDecayLR")


@rule("warning", before="0.17.2")
def warmup_peak(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupLR`: until 0.17.2 its warmup_max_lr was 0.001 as well."""
    return _default_peak(facts, "WarmupLR")


def _default_peak(facts: Facts, schedule: str) -> Found:
    lr = facts.number("optimizer.params.lr", 0.001)
    if facts.text(_TYPE) != schedule or facts.given(_PEAK) or lr == 0.001:
        return
    if facts.given("scheduler.params") and facts.get(_PEAK, 0) is not None:
        known = facts.given("optimizer.params.lr") and lr is not None
        reason = f"left out, {schedule} trains at 0.001" + (f", not at the optimizer's {lr}" if known else "")
        yield _PEAK, reason, f"set {_PEAK}: {lr if known else 0.001}"


@rule("warning")
def warmup_too_long(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupDecayLR`, `WarmupCosineLR`: only a log line if it is as long."""
    key = "scheduler.params.total_num_steps"
    total, warmup = facts.whole(key) or 0, facts.whole(_STEPS, _WARMUP_STEPS) or 0
    if facts.text(_TYPE) in ("WarmupDecayLR", "WarmupCosineLR") and 1 < total <= warmup:
        default = "" if facts.given(_STEPS) else ", the default,"
        reason = f"the warm-up of {warmup} steps{default} never reaches its peak in {total} steps"
        yield key, reason, f"set {_STEPS}: {max(1, total // 10)}"


@rule("warning")
def warmup_falls(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `delta_lrs`: a peak below the first rate makes the warm-up fall."""
    kind, key = facts.text(_TYPE), "scheduler.params.warmup_min_lr"
    least = facts.number(key)
    lr = facts.number("optimizer.params.lr") if kind == "WarmupLR" else 0.001
    peak = facts.number(_PEAK, lr)
    if kind in ("WarmupLR", "WarmupDecayLR") and least is not None and peak is not None and least > peak >= 0:
        yield key, f"the warm-up falls from there to {peak}", f"set {key}: 0.0"


@rule()
def warmup_without_steps(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupLR`: "warmup_num_steps must be a positive integer"; 2 until 0.19.3."""
    steps = facts.whole(_STEPS)
    if facts.text(_TYPE) in _WARMUPS and steps is not None and steps < 1:
        fix = f"set {_STEPS}: 2"
        if facts.since("0.19.3"):
            yield _STEPS, "a warm-up has one step at least", fix
        else:
            yield _STEPS, "this release takes 2 instead", fix, "warning"
