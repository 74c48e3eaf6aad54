"""fp16, bf16, autocast, and the dtypes that must agree with them."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps

from framework.dslint.facts import Facts
from framework.dslint.rules.base import error, holds, warning
from framework.errors import Problem

_FP32_POWERS = 128
_POWERS_IN_MEMORY = 10**9
FP16_MASTER, BF16_MASTER = "fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"


def two_half_precisions(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_initialize_params`: "bfloat16 and fp16 modes cannot be simultaneously enabled"."""
    if facts.flag("fp16.enabled", False) and facts.flag("bf16.enabled", False):
        yield error(
            facts,
            "fp16-with-bf16",
            "fp16.enabled",
            "fp16 and bf16 are both enabled",
            "set fp16.enabled: false or bf16.enabled: false",
        )


@holds(before="0.19.8")
def amp_goes_alone(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_optimizer_sanity_check` until 0.19.8: neither ZeRO nor 16-bit weights with
    apex's amp.
    """
    other = f"ZeRO stage {facts.stage}" if facts.stage else facts.model_dtype
    if facts.get("amp.enabled", False) and other not in (None, "fp32"):
        yield error(
            facts, "amp-not-alone", "amp.enabled", f"apex's amp does not go with {other}", "set amp.enabled: false"
        )


def auto_cast_without_fp16(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `fp16_auto_cast` is asked by itself: `_cast_inputs_half` casts positional inputs
    only.
    """
    if facts.flag("fp16.auto_cast", False) and facts.flag("fp16.enabled", False) is False:
        yield warning(
            facts,
            "auto-cast-without-fp16",
            "fp16.auto_cast",
            "positional inputs with a decimal point become fp16, but the weights do not",
            "set fp16.auto_cast: false",
        )


def dynamic_loss_scale(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/precision_config.py `_validate_dynamic_loss_scale_params`: "must be > 0 when dynamic loss
    scaling is".

    Until 0.19.3 nobody asked: a window of 0 divided by zero, and a negative one doubled the scale at every step.
    """
    if not facts.flag("fp16.enabled", False) or facts.number("fp16.loss_scale", 0) != 0:
        return
    for key, default in (("fp16.loss_scale_window", 1000), ("fp16.min_loss_scale", 1)):
        number = facts.whole(key, default)
        if number is not None and number < 1:
            yield error(
                facts, "dynamic-loss-scale", key, "dynamic loss scaling needs 1 at least", f"set {key}: {default}"
            )


def loss_scale_stands_still(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/fp16/loss_scaler.py `update_scale` lowers the scale where `cur_hysteresis` counts down to
    exactly 1.

    Below 1 it never does, and every step is skipped from the first overflow on. A scale beyond fp32 overflows in every
    step. ZeRO computes the first scale as a whole number with fp16 off too (precision_config.py
    `dynamic_loss_scale_args`).
    """
    hysteresis, power = facts.whole("fp16.hysteresis", 2), facts.whole("fp16.initial_scale_power", 16)
    if power is not None and power > _POWERS_IN_MEMORY and facts.stage in (1, 2, 3):
        yield error(
            facts,
            "loss-scale-stuck",
            "fp16.initial_scale_power",
            "DeepSpeed computes 2 to this power, fp16 or not",
            "set fp16.initial_scale_power: 16",
        )
        return
    if not facts.flag("fp16.enabled", False) or facts.number("fp16.loss_scale", 0) != 0:
        return
    if hysteresis is not None and hysteresis < 1:
        yield error(
            facts,
            "loss-scale-stuck",
            "fp16.hysteresis",
            "below 1 the loss scale is never lowered",
            "set fp16.hysteresis: 2",
        )
    if power is not None and power >= _FP32_POWERS:
        yield error(
            facts,
            "loss-scale-stuck",
            "fp16.initial_scale_power",
            f"2 to the {power} is infinite in fp32",
            "set fp16.initial_scale_power: 16",
        )


@holds(since="0.19.3")
def loss_scale_is_a_number(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/precision_config.py `_reject_non_integer_scale_params`: "must be an integer, not bool", on or
    off.
    """
    for key, default in (("fp16.loss_scale", 0), ("fp16.loss_scale_window", 1000), ("fp16.min_loss_scale", 1)):
        if isinstance(facts.get(key), bool):
            yield error(
                facts,
                "loss-scale-boolean",
                key,
                "DeepSpeed takes no truth value for a number here",
                f"set {key}: {default}",
            )


def half_precision_of_the_device(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "Type fp16 is not supported on your device"."""
    gpu = facts.topology.gpu
    where = gpu.name if gpu and not gpu.fp16 else "a CPU" if facts.topology.device == "cpu" else ""
    if facts.flag("fp16.enabled", False) and where:
        yield error(
            facts,
            "fp16-unsupported",
            "fp16.enabled",
            f"DeepSpeed does not train fp16 on {where}",
            "set fp16.enabled: false",
        )


def emulated_bf16(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: torch says yes for devices that only emulate bf16."""
    gpu = facts.topology.gpu
    if gpu and not gpu.bf16 and facts.flag("bf16.enabled", False):
        yield warning(
            facts,
            "bf16-emulated",
            "bf16.enabled",
            f"{gpu.name} has no bf16 units: it is accepted and computed slowly by emulation",
            "set bf16.enabled: false",
        )


def accumulation_dtype(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_optimizer_sanity_check`: "unsupported mix of" two dtypes without ZeRO."""
    model, sums = facts.model_dtype, facts.accumulation_dtype
    if facts.stage == 0 and facts.given("data_types.grad_accum_dtype") and model and sums and model != sums:
        yield error(
            facts,
            "grad-accum-dtype",
            "data_types.grad_accum_dtype",
            f"without ZeRO, gradients of {model} weights cannot be summed in {sums}",
            f'set data_types.grad_accum_dtype: "{model}" or zero_optimization.stage: 2',
        )


@holds(since="0.19.2")
def param_dtype(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_assert_valid_mixed_precision_config`: must be the dtype that fp16 or bf16 imply."""
    wanted, model = facts.dtype("data_types.param_dtype"), facts.model_dtype
    if wanted and model and wanted != model:
        yield error(
            facts,
            "param-dtype",
            "data_types.param_dtype",
            f"fp16 and bf16 say that the weights are {model}",
            f'set data_types.param_dtype: "{model}"',
        )


@holds(since="0.19.8")
def keep_in_fp32_patterns(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_initialize_params`: `KEEP_IN_FP32_MODULES` is "auto" or a list, and no other
    text.
    """
    text = facts.text("data_types.keep_in_fp32_modules", "auto")
    if text is not None and text != "auto":
        yield error(
            facts,
            "keep-in-fp32-text",
            "data_types.keep_in_fp32_modules",
            "a list of name patterns belongs here",
            f"set data_types.keep_in_fp32_modules: {dumps([text])}",
        )


@holds(before="0.18.3")
def fp16_master_needs_stage2(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_do_error_check`: until 0.18.3 fp16 master weights were for ZeRO stage 2."""
    if facts.stage in (0, 1, 3) and facts.flag(FP16_MASTER, False):
        yield error(
            facts,
            "fp16-master-needs-stage2",
            FP16_MASTER,
            "this release keeps fp16 master weights at stage 2 only",
            f"set {FP16_MASTER}: false",
        )


@holds(since="0.18.3")
def master_weights_need_zero(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_do_error_check`: "only supported with ZeRO Stage 1, 2, or 3", enabled or not."""
    for key in (FP16_MASTER, BF16_MASTER):
        if facts.stage == 0 and facts.flag(key, False):
            yield error(
                facts,
                "master-weights-need-zero",
                key,
                "half-precision master weights need ZeRO stage 1 to 3",
                f"set {key}: false",
            )


@holds(since="0.18.3")
def bf16_states_need_bf16_master(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_do_error_check`: "bf16_optimizer_states requires bf16_master_weights_and_grads"."""
    if facts.flag("bf16.bf16_optimizer_states", False) and facts.flag(BF16_MASTER, False) is False:
        yield error(
            facts,
            "bf16-states-need-bf16-master",
            "bf16.bf16_optimizer_states",
            "optimizer states in bf16 need master weights in bf16",
            f"set bf16.bf16_optimizer_states: false or {BF16_MASTER}: true",
        )


@holds(since="0.18.3")
def two_master_dtypes(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/base_optimizer.py `_configure_master_weights`: "are mutually exclusive"."""
    if facts.flag(FP16_MASTER, False) and facts.flag(BF16_MASTER, False) and facts.stage in (1, 2, 3):
        yield error(
            facts,
            "two-master-dtypes",
            FP16_MASTER,
            "master weights cannot be both fp16 and bf16",
            f"set {FP16_MASTER}: false or {BF16_MASTER}: false",
        )


def master_weights_need_cpu_adam(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/base_optimizer.py `_configure_master_weights`: `fp16_offload_validator` and its like want CPU
    Adam.

    bf16 states on the device are the exception (`bf16_optimizer_states` without offload).
    """
    fp16, bf16 = facts.flag(FP16_MASTER, False), facts.flag(BF16_MASTER, False)
    asked = facts.stage in ((1, 2, 3) if facts.since("0.18.3") else (2,)) and not facts.uses_bf16_optimizer
    if not asked or bool(fp16) == bool(bf16):
        return
    on_device = facts.flag("bf16.bf16_optimizer_states", False) and not facts.offloads_optimizer
    if (bf16 and on_device) or (facts.offloads_optimizer and facts.uses_cpu_adam is not False):
        return
    key, fix = (FP16_MASTER, "") if fp16 else (BF16_MASTER, " or bf16.bf16_optimizer_states: true")
    needed = [] if facts.offloads_optimizer else ['zero_optimization.offload_optimizer.device: "cpu"']
    if facts.uses_cpu_adam is False and facts.optimizer not in ("adam", "adamw"):
        needed.append('optimizer.type: "AdamW"')
    if facts.flag("optimizer.params.torch_adam", False):
        needed.append("optimizer.params.torch_adam: false")
    setting = f"{' and '.join(needed)} or " if needed and not facts.given("zero_optimization.zenflow") else ""
    yield error(
        facts,
        "master-weights-need-cpu-adam",
        key,
        "these master weights need DeepSpeed's CPU Adam on the host",
        f"set {setting}{key}: false" + ("" if facts.offloads_optimizer else fix),
    )


@holds(since="0.17.2")
def autocast_without_dtype(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `get_torch_autocast_dtype` answers None: fp16 on CUDA, and no gradient scaler."""
    section = facts.section("torch_autocast")
    if facts.flag("torch_autocast.enabled", False) and "dtype" not in section:
        yield warning(
            facts,
            "autocast-without-dtype",
            "torch_autocast.dtype",
            "left out, the device decides: fp16 on CUDA, without the gradient scaler that fp16 needs",
            'set torch_autocast.dtype: "bfloat16"',
        )


@holds(since="0.17.2")
def autocast_in_int8(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `DtypeEnum` has an int8 that torch switches autocast off for; stage 3 stops at it."""
    if facts.flag("torch_autocast.enabled", False) and facts.dtype("torch_autocast.dtype") == "int8":
        yield error(
            facts,
            "autocast-in-int8",
            "torch_autocast.dtype",
            "autocast computes in fp16 or bf16",
            'set torch_autocast.dtype: "bfloat16"',
        )


@holds(since="0.17.2")
def autocast_module_paths(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/torch_autocast.py `init_autocast_params` imports each: "Failed to import lower precision safe
    module".
    """
    key = "torch_autocast.lower_precision_safe_modules"
    names = facts.get(key)
    if not facts.flag("torch_autocast.enabled", False) or not isinstance(names, list):
        return
    if any(isinstance(name, str) and not all(name.rpartition(".")) for name in names):
        whole = [name if "." in str(name) else f"torch.nn.{name}" for name in names]
        yield error(
            facts, "autocast-module-path", key, "a class is named with its package", f"set {key}: {dumps(whole)}"
        )


@holds(since="0.18.3")
def autocast_of_half_weights(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/torch_autocast.py `_validate_auto_cast_settings` asks no more: both are accepted together."""
    half = facts.model_dtype
    if half in ("fp16", "bf16") and facts.flag("torch_autocast.enabled", False):
        yield warning(
            facts,
            "autocast-of-half-weights",
            "torch_autocast.enabled",
            f"autocast means fp32 weights, but {half} is enabled too and the weights are {half}",
            f"set torch_autocast.enabled: false or {half}.enabled: false",
        )


@holds(since="0.17.2", before="0.18.3")
def autocast_with_half_precision(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/torch_autocast.py `_validate_auto_cast_settings`: until 0.18.3 an assertion."""
    half = facts.model_dtype
    if half in ("fp16", "bf16") and facts.flag("torch_autocast.enabled", False):
        yield error(
            facts,
            "autocast-with-half-precision",
            "torch_autocast.enabled",
            f"this release refuses autocast and {half} together",
            f"set torch_autocast.enabled: false or {half}.enabled: false",
        )


@holds(since="0.17.2")
def autocast_with_quantized_weights(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/torch_autocast.py `_validate_auto_cast_settings`: asked at every stage."""
    if facts.flag("torch_autocast.enabled", False) and facts.flag("zero_optimization.zero_quantized_weights", False):
        yield error(
            facts,
            "autocast-with-quantized-weights",
            "torch_autocast.enabled",
            "autocast and quantized weights exclude each other",
            "set torch_autocast.enabled: false or zero_optimization.zero_quantized_weights: false",
        )
