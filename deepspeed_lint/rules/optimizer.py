"""The sections optimizer, with what ZeRO, offload and precision allow of it, and scheduler, which
drives it.
"""

from __future__ import annotations

import re
from typing import Final

from deepspeed_lint.facts import DEEPSPEED_OPTIMIZERS, REMOVED_OPTIMIZERS, Facts
from deepspeed_lint.rules.base import Found, rule
from deepspeed_lint.text.typos import nearest
from deepspeed_lint.values import OPTIMIZERS, SCHEDULERS

# Classes of torch.optim; Muon came with torch 2.9. DeepSpeed takes them by exact name.
TORCH_OPTIMIZERS: Final = OPTIMIZERS.keys() | {"Adagrad", "Adam", "AdamW", "Muon"}
# What ZeRO was tested with. mup's MuAdam and MuAdamW build torch's Adam, which is on the list;
# MuSGD builds SGD.
TESTED: Final = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})
_CLASS: Final = re.compile(r"^(?:DeepSpeed)?(?:CPU|Fused)?_?", re.IGNORECASE)
_TYPE: Final = "optimizer.type"


@rule()
def optimizer_unknown(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_is_supported_optimizer`: DeepSpeed's own names, or a class of
    torch.optim.
    """
    name = facts.optimizer
    if not name or name in TORCH_OPTIMIZERS | DEEPSPEED_OPTIMIZERS:
        return
    is_removed = name.lower() in REMOVED_OPTIMIZERS
    if is_removed and not facts.since("0.19.7"):
        return
    if is_removed:
        reason = "DeepSpeed 0.19.7 removed the optimizers that compress to one bit"
        yield _TYPE, reason, f'set {_TYPE}: "AdamW"'
    else:
        reason = "neither DeepSpeed nor torch.optim has such an optimizer"
        yield _TYPE, reason, f'set {_TYPE}: "{_nearest_optimizer(name)}"'


def _nearest_optimizer(name: str) -> str:
    """Return the optimizer that a name means: for a class of DeepSpeed's the one that it is."""
    plain = _CLASS.sub("", name).removesuffix("_8bit") or name
    if plain.lower() == "adam":
        return "AdamW"  # DeepSpeed's FusedAdam and CPU Adam decay as AdamW does
    known = TORCH_OPTIMIZERS | {"Lamb", "Lion"}
    if name.lower().startswith("mu"):
        known |= {"MuAdam", "MuAdamW", "MuSGD"}
    return nearest(plain, known) or "AdamW"


@rule()
def optimizer_untested(facts: Facts) -> Found:
    """deepspeed/runtime/zero/utils.py `is_zero_supported_optimizer`, for engine.py
    `_do_optimizer_sanity_check`.
    """
    name = facts.optimizer
    known = name in TORCH_OPTIMIZERS or name in ("lamb", "musgd")
    allowed = facts.get("zero_allow_untested_optimizer")  # any true value will do
    if known and name not in TESTED and facts.stage and not allowed:
        reason = f"DeepSpeed takes it with ZeRO stage {facts.stage} only when asked to"
        yield _TYPE, reason, "set zero_allow_untested_optimizer: true"


@rule("warning")
def adam_is_adamw(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `ADAM_W_MODE_DEFAULT`: "Adam" decays weights as AdamW does by
    default.
    """
    decay = facts.number("optimizer.params.weight_decay")
    if facts.optimizer == "adam" and decay and facts.get("optimizer.params.adam_w_mode") is None:
        reason = (
            f"with weight_decay {decay:g} DeepSpeed's Adam is AdamW: the decay is not part "
            "of the gradient"
        )
        yield _TYPE, reason, f'set {_TYPE}: "AdamW" or optimizer.params.adam_w_mode: false'


_WARMUPS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# deepspeed/runtime/lr_schedules.py `VALID_LR_SCHEDULES`.
DEEPSPEED_SCHEDULES: Final = ("LRRangeTest", "OneCycle", *_WARMUPS)
_FROM_CODE: Final = frozenset({"ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR"})
# Classes of torch.optim.lr_scheduler.
TORCH_SCHEDULES: Final = SCHEDULERS.keys() | _FROM_CODE
_WARMUP_STEPS: Final = 1000  # warmup_num_steps when left out
_SCHEDULE: Final = "scheduler.type"
_STEPS: Final = "scheduler.params.warmup_num_steps"
_PEAK: Final = "scheduler.params.warmup_max_lr"
_ANOTHER: Final = (
    f"pass lr_scheduler= to deepspeed.initialize, or use one of {', '.join(DEEPSPEED_SCHEDULES)}"
)


@rule()
def scheduler_unknown(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_scheduler_from_config`: "DeepSpeed does not recognize LR
    scheduler"; by case.
    """
    name = facts.text(_SCHEDULE)
    if name and name not in DEEPSPEED_SCHEDULES and name not in TORCH_SCHEDULES:
        fix = f'set {_SCHEDULE}: "{nearest(name, DEEPSPEED_SCHEDULES) or "WarmupLR"}"'
        yield _SCHEDULE, "neither DeepSpeed nor torch has such a schedule", fix


@rule()
def torch_scheduler_with_wrapper(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_scheduler_from_config` hands torch's the wrapped optimizer: a
    TypeError.
    """
    cause = _cause_of_wrapper(facts)
    if cause and facts.text(_SCHEDULE) in TORCH_SCHEDULES:
        reason = f"torch's schedules refuse the optimizer that DeepSpeed wraps for {cause}"
        yield _SCHEDULE, reason, _ANOTHER


def _cause_of_wrapper(facts: Facts) -> str:
    """Return why DeepSpeed wraps the optimizer; empty if it does not."""
    if facts.stage:
        return f"ZeRO stage {facts.stage}"
    if facts.model_dtype in ("fp16", "bf16"):
        return facts.model_dtype
    return ""


@rule("warning")
def warmup_decay_peak(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupDecayLR`: warmup_max_lr is 0.001 with any rate of
    the optimizer.
    """
    return _default_peak(facts, "WarmupDecayLR")


@rule("warning", before="0.17.2")
def warmup_peak(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupLR`: until 0.17.2 its warmup_max_lr was 0.001 as
    well.
    """
    return _default_peak(facts, "WarmupLR")


def _default_peak(facts: Facts, schedule: str) -> Found:
    lr = facts.number("optimizer.params.lr", 0.001)
    if facts.text(_SCHEDULE) != schedule or lr == 0.001 or not _leaves_peak_out(facts):
        return
    reason = f"left out, {schedule} trains at 0.001"
    peak = 0.001
    if facts.given("optimizer.params.lr") and lr is not None:
        reason += f", not at the optimizer's {lr}"
        peak = lr
    yield _PEAK, reason, f"set {_PEAK}: {peak}"


def _leaves_peak_out(facts: Facts) -> bool:
    """Check whether a schedule has parameters, and its peak is none of them; null is given."""
    if facts.given(_PEAK) or not facts.given("scheduler.params"):
        return False
    return facts.get(_PEAK, 0) is not None


@rule("warning")
def warmup_too_long(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupDecayLR`, `WarmupCosineLR`: only a log line if it is
    as long.
    """
    key = "scheduler.params.total_num_steps"
    total = facts.whole(key) or 0
    warmup = facts.whole(_STEPS, _WARMUP_STEPS) or 0
    if facts.text(_SCHEDULE) in ("WarmupDecayLR", "WarmupCosineLR") and 1 < total <= warmup:
        if facts.given(_STEPS):
            default = ""
        else:
            default = ", the default,"
        reason = f"the warm-up of {warmup} steps{default} never reaches its peak in {total} steps"
        yield key, reason, f"set {_STEPS}: {max(1, total // 10)}"


@rule("warning")
def warmup_falls(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `delta_lrs`: a peak below the first rate makes the warm-up
    fall.
    """
    key = "scheduler.params.warmup_min_lr"
    least = facts.number(key)
    peak = _peak_of_warmup(facts)
    if least is not None and peak is not None and least > peak >= 0:
        yield key, f"the warm-up falls from there to {peak}", f"set {key}: 0.0"


def _peak_of_warmup(facts: Facts) -> float | None:
    """Return the peak of a schedule that warms up from a least rate; None for others."""
    kind = facts.text(_SCHEDULE)
    if kind == "WarmupLR":
        return facts.number(_PEAK, facts.number("optimizer.params.lr"))
    if kind == "WarmupDecayLR":
        return facts.number(_PEAK, 0.001)
    return None


@rule()
def warmup_without_steps(facts: Facts) -> Found:
    """deepspeed/runtime/lr_schedules.py `WarmupLR`: "warmup_num_steps must be a positive integer";
    2 until 0.19.3.
    """
    steps = facts.whole(_STEPS)
    if facts.text(_SCHEDULE) in _WARMUPS and steps is not None and steps < 1:
        fix = f"set {_STEPS}: 2"
        if facts.since("0.19.3"):
            yield _STEPS, "a warm-up has one step at least", fix
        else:
            yield _STEPS, "this release takes 2 instead", fix, "warning"
