"""fp16, bf16, autocast, and the dtypes that must agree with them."""

from __future__ import annotations

from json import dumps
from typing import Final

from deepspeed_lint.facts import Facts
from deepspeed_lint.rules.base import Found, rule
from deepspeed_lint.rules.zero import cpu_adam_or
from deepspeed_lint.topology import Topology

_FP32_POWERS: Final = 128
_POWERS_IN_MEMORY: Final = 10**9
FP16_MASTER: Final = "fp16.fp16_master_weights_and_grads"
BF16_MASTER: Final = "bf16.bf16_master_weights_and_grads"
_BF16_STATES: Final = "bf16.bf16_optimizer_states"
_SCALES: Final = {"fp16.loss_scale": 0, "fp16.loss_scale_window": 1000, "fp16.min_loss_scale": 1}
_AUTOCAST: Final = "torch_autocast.enabled"


def _scales_by_itself(facts: Facts) -> bool:
    return bool(facts.flag("fp16.enabled")) and facts.number("fp16.loss_scale", 0) == 0


@rule()
def dynamic_loss_scale(facts: Facts) -> Found:
    """deepspeed/runtime/precision_config.py `_validate_dynamic_loss_scale_params`: "must be > 0
    when dynamic loss".

    Until 0.19.3 it was not checked: a window of 0 divided by zero, and a negative one doubled the
    scale at every step.
    """
    for key in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        number = facts.whole(key, _SCALES[key])
        if number is not None and number < 1 and _scales_by_itself(facts):
            yield key, "dynamic loss scaling needs 1 at least", f"set {key}: {_SCALES[key]}"


@rule()
def loss_scale_stuck(facts: Facts) -> Found:
    """deepspeed/runtime/fp16/loss_scaler.py `update_scale` lowers it where `cur_hysteresis` counts
    down to exactly 1.

    Below 1 it never does, and every step is skipped from the first overflow on. A scale beyond fp32
    overflows in every step. ZeRO computes the first scale as a whole number with fp16 off too
    (precision_config.py `dynamic_loss_scale_args`).
    """
    key = "fp16.initial_scale_power"
    power = facts.whole(key, 16) or 0
    if power > _POWERS_IN_MEMORY and facts.stage:
        yield key, "DeepSpeed computes 2 to this power, fp16 or not", f"set {key}: 16"
    elif _scales_by_itself(facts):
        yield from _low_hysteresis(facts)
        if power >= _FP32_POWERS:
            yield key, f"2 to the {power} is infinite in fp32", f"set {key}: 16"


def _low_hysteresis(facts: Facts) -> Found:
    key = "fp16.hysteresis"
    hysteresis = facts.whole(key, 2)
    if hysteresis is not None and hysteresis < 1:
        yield key, "below 1 the loss scale is never lowered", f"set {key}: 2"


@rule(since="0.19.3")
def loss_scale_boolean(facts: Facts) -> Found:
    """deepspeed/runtime/precision_config.py `_reject_non_integer_scale_params`: "must be an
    integer, not bool".
    """
    for key, default in _SCALES.items():
        if isinstance(facts.get(key), bool):
            yield key, "DeepSpeed takes no truth value for a number here", f"set {key}: {default}"


@rule(on="fp16.enabled")
def fp16_unsupported(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "Type fp16 is not supported on your
    device".
    """
    where = _without_fp16(facts.topology)
    if where:
        yield "fp16.enabled", f"DeepSpeed does not train fp16 on {where}", "set fp16.enabled: false"


def _without_fp16(topology: Topology) -> str:
    """Return the device if it is one without fp16; empty if it is not."""
    gpu = topology.gpu
    if gpu and not gpu.fp16:
        return gpu.name
    if topology.device == "cpu":
        return "a CPU"
    return ""


@rule("warning", on="bf16.enabled")
def bf16_emulated(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_do_sanity_check`: torch supports bf16 where it is only
    emulated.
    """
    gpu = facts.topology.gpu
    if gpu and not gpu.bf16:
        reason = f"{gpu.name} has no bf16 units: it is accepted and computed slowly by emulation"
        fix = "set bf16.enabled: false"
        if gpu.fp16:
            fix += " and fp16.enabled: true"
        yield "bf16.enabled", reason, fix


@rule()
def grad_accum_dtype(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_do_optimizer_sanity_check`: "unsupported mix of" two dtypes
    without ZeRO.
    """
    key = "data_types.grad_accum_dtype"
    model = facts.model_dtype
    sums = facts.accumulation_dtype
    if facts.stage == 0 and facts.given(key) and _differ(model, sums):
        reason = f"without ZeRO, gradients of {model} weights cannot be summed in {sums}"
        yield key, reason, f'set {key}: "{model}" or zero_optimization.stage: 2'


def _differ(first: str | None, second: str | None) -> bool:
    """Check whether two dtypes are known, and differ."""
    return first is not None and second is not None and first != second


@rule(since="0.19.2")
def param_dtype(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_assert_valid_mixed_precision_config`: must be the dtype that
    fp16 or bf16 imply.
    """
    key = "data_types.param_dtype"
    model = facts.model_dtype
    if _differ(facts.dtype(key), model):
        yield key, f"fp16 and bf16 say that the weights are {model}", f'set {key}: "{model}"'


@rule(since="0.19.8")
def keep_in_fp32_text(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `_initialize_params`: `KEEP_IN_FP32_MODULES` is "auto" or a list,
    and no other.
    """
    key = "data_types.keep_in_fp32_modules"
    text = facts.text(key, "auto")
    if text is not None and text != "auto":
        yield key, "a list of name patterns belongs here", f"set {key}: {dumps([text])}"


@rule()
def master_weights_need_cpu_adam(facts: Facts) -> Found:
    """deepspeed/runtime/base_optimizer.py `_configure_master_weights`: `fp16_offload_validator`
    wants CPU Adam.
    """
    key = _master_weights(facts)
    if not key or not _checks_master_weights(facts) or _may_keep_master_weights(facts, key):
        return
    states = ""
    if key == BF16_MASTER and not facts.offloads_optimizer:
        states = f" or {_BF16_STATES}: true"
    reason = "these master weights need DeepSpeed's CPU Adam on the host"
    yield key, reason, cpu_adam_or(facts, f"{key}: false{states}")


def _master_weights(facts: Facts) -> str:
    """Return the key of the two that is on; empty if none is, or both are."""
    fp16 = facts.flag(FP16_MASTER)
    bf16 = facts.flag(BF16_MASTER)
    if fp16 and not bf16:
        return FP16_MASTER
    if bf16 and not fp16:
        return BF16_MASTER
    return ""


def _may_keep_master_weights(facts: Facts, key: str) -> bool:
    """Check whether CPU Adam takes the step, or whether they are the exception: bf16 states on the
    device (`bf16_optimizer_states` without offload).
    """
    if facts.offloads_optimizer:
        return facts.uses_cpu_adam is not False
    return key == BF16_MASTER and bool(facts.flag(_BF16_STATES))


def _checks_master_weights(facts: Facts) -> bool:
    if not facts.stage or facts.uses_bf16_optimizer:
        return False
    return facts.stage == 2 or facts.since("0.18.3")


@rule(since="0.17.2", on=_AUTOCAST)
def autocast_module_path(facts: Facts) -> Found:
    """deepspeed/runtime/torch_autocast.py `init_autocast_params` imports each: "Failed to import
    lower precision".
    """
    key = "torch_autocast.lower_precision_safe_modules"
    names = facts.get(key)
    if isinstance(names, list) and any(map(_lacks_package, names)):
        full_names = [name if "." in str(name) else f"torch.nn.{name}" for name in names]
        yield key, "a class is named with its package", f"set {key}: {dumps(full_names)}"


def _lacks_package(name: object) -> bool:
    """Check whether a text is no ``package.Class``, with a dot between two names."""
    return isinstance(name, str) and not all(name.rpartition("."))
