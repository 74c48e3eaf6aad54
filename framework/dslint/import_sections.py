"""From DeepSpeed's sections to ours: precision and ZeRO. What DeepSpeed does where a key is left out is written
down.
"""

from __future__ import annotations

from typing import Final

from framework.config.precision import BF16, FP16
from framework.config.zero import NEEDED_STAGE, OFFLOADS, STAGE3_KEYS, Zero
from framework.dslint.import_reading import Reading, Values

_COMPUTE: Final = {"bf16": "bf16", "fp16": "fp16"}
_COMMON: Final = (
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "round_robin_gradients",
)
_STAGE12: Final = ("allgather_bucket_size",)


def precision(reading: Reading) -> Values:
    """`fp16`, `bf16`, `torch_autocast`: at most one of them is on."""
    on = [name for name in ("fp16", "bf16", "torch_autocast") if _is_on(reading, name)]
    for name in ("fp16", "bf16", "torch_autocast"):
        if name not in on:
            reading.idle(name, f"{name} is not enabled")
    autos = [f"{name}.enabled" for name in ("fp16", "bf16", "torch_autocast") if reading.is_auto(f"{name}.enabled")]
    if autos and not on:
        reading.comments["precision.dtype"] = f'{" and ".join(autos)} "auto" in the file; this is our default'
    else:  # one is enabled, so "auto" for another one means no
        reading.comments.pop("precision.dtype", None)
    if len(on) > 1:
        reading.refuse(f"{on[1]}.enabled", f"{on[0]} is enabled as well, and a run has one precision", "disable one")
        return {}
    if on == ["fp16"]:
        ours = FP16()
        keys = [key for key in FP16.model_fields if key != "dtype"]
        return {
            "dtype": "fp16",
            **{key: reading.take(f"fp16.{key}", f"precision.{key}", getattr(ours, key)) for key in keys},
        }
    if on == ["bf16"]:
        check = reading.take("bf16.check_grad_overflow", "precision.check_grad_overflow", BF16().check_grad_overflow)
        return {"dtype": "bf16", "check_grad_overflow": check}
    return _autocast(reading) if on else {"dtype": "fp32"}


def _is_on(reading: Reading, name: str) -> bool:
    path = f"{name}.enabled"
    return reading.take(path, "precision.dtype", False) is True


def _autocast(reading: Reading) -> Values:
    reading.place("torch_autocast.dtype")
    dtype = reading.facts.dtype("torch_autocast.dtype")
    if dtype not in _COMPUTE:
        reading.refuse(
            "torch_autocast.dtype", "a run config says what autocast computes in", "write bfloat16 or float16"
        )
        return {}
    reading.given["precision.compute_dtype"] = "torch_autocast.dtype"
    section: Values = {"dtype": "autocast", "compute_dtype": _COMPUTE[dtype]}
    modules = reading.take(
        "torch_autocast.lower_precision_safe_modules", "precision.lower_precision_safe_modules", None
    )
    return section if modules is None else {**section, "lower_precision_safe_modules": modules}


def zero(reading: Reading) -> Values:
    """`zero_optimization`: what works at its stage."""
    stage = reading.take("zero_optimization.stage", "zero.stage", 0)
    reading.place("zero_optimization")
    section: Values = {"stage": stage}
    if stage == 0:
        reading.idle("zero_optimization", "it does nothing at stage 0")
        return section
    ours = Zero()
    for name in (*_COMMON, *(STAGE3_KEYS if stage == 3 else _STAGE12)):
        value = reading.take(f"zero_optimization.{name}", f"zero.{name}", getattr(ours, name))
        if value is not None:
            section[name] = value
    for name in _STAGE12 if stage == 3 else STAGE3_KEYS:
        reading.idle(f"zero_optimization.{name}", f"it does nothing at stage {stage}")
    for name in OFFLOADS:
        section |= _offload(reading, name, stage)
    return section


def _offload(reading: Reading, name: str, stage: int) -> Values:
    path = f"zero_optimization.{name}"
    device = reading.take(f"{path}.device", f"zero.{name}.device", "none")
    reading.place(path)
    if device in (None, "none"):
        reading.idle(path, "nothing is offloaded")
        return {}
    needed = NEEDED_STAGE[name].get(device, 3)
    if stage < needed:
        reading.idle(path, f"it does nothing at stage {stage}")
        reading.drop(
            reading.facts.written(f"{path}.device"), device, f"DeepSpeed offloads to {device} from stage {needed} on"
        )
        return {}
    fields = OFFLOADS[name][device].model_fields
    kept: Values = {"device": device}
    for key, field in fields.items():
        if key != "device":
            kept[key] = reading.take(f"{path}.{key}", f"zero.{name}.{key}", field.default)
    if device == "cpu":
        for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write"):
            reading.idle(f"{path}.{key}", "it is for nvme")
    return {name: kept}
