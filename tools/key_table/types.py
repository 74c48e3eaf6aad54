"""The parameters of optimizers and schedules, which depend on the type that the section names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tools.key_table.models import Entry
from tools.key_table.sources import listed_strings, reads_of, signature_of

# Type in the JSON -> classes that its parameters reach.
OPTIMIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": ("ops.adam.fused_adam:FusedAdam", "ops.adam.cpu_adam:DeepSpeedCPUAdam"),
    "AdamW": ("ops.adam.fused_adam:FusedAdam", "ops.adam.cpu_adam:DeepSpeedCPUAdam"),
    "Adagrad": ("ops.adagrad.cpu_adagrad:DeepSpeedCPUAdagrad",),
    "Lamb": ("ops.lamb.fused_lamb:FusedLamb",),
    "Lion": ("ops.lion.fused_lion:FusedLion", "ops.lion.cpu_lion:DeepSpeedCPULion"),
    "Muon": (),
    "MuAdam": (),
    "MuAdamW": (),
    "MuSGD": (),
    "OneBitAdam": ("runtime.fp16.onebit.adam:OnebitAdam",),
    "ZeroOneAdam": ("runtime.fp16.onebit.zoadam:ZeroOneAdam",),
    "OneBitLamb": ("runtime.fp16.onebit.lamb:OnebitLamb",),
}
REMOVED_OPTIMIZERS: Final = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
# What torch's own classes take (torch 2.x), reached by `torch_adam`, without offload, or through
# the mup package.
_TORCH_ADAM: Final[Mapping[str, Any]] = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_TORCH_ADAGRAD: Final[Mapping[str, Any]] = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "eps": 1e-10,
    "maximize": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
}
_TORCH_SGD: Final[Mapping[str, Any]] = {
    "lr": 1e-3,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
}
# mup takes the rate from its keywords before torch's default could help (mup/optim.py
# `process_param_groups`).
_NEEDED: Final = object()
TORCH_CLASSES: Final[Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]]] = {
    "Adam": (("torch.optim.Adam", _TORCH_ADAM),),
    "AdamW": (("torch.optim.AdamW", _TORCH_ADAM),),
    "Adagrad": (("torch.optim.Adagrad", _TORCH_ADAGRAD),),
    "MuAdam": (("mup.MuAdam", {**_TORCH_ADAM, "lr": _NEEDED}),),
    "MuAdamW": (("mup.MuAdamW", {**_TORCH_ADAM, "lr": _NEEDED}),),
    "MuSGD": (("mup.MuSGD", {**_TORCH_SGD, "lr": _NEEDED}),),
}
_POSITIONAL: Final = ("params", "model_params", "deepspeed", "optimizer", "adamw_mode")


def optimizers() -> Iterator[tuple[str, Entry]]:
    """Types of optimizers, each with what its classes take."""
    config = importlib.import_module("deepspeed.runtime.config")
    known = set(config.DEEPSPEED_OPTIMIZERS)
    unexpected_files = known - {name.lower() for name in OPTIMIZERS}
    if unexpected_files:
        raise SystemExit(
            f"unknown optimizer types {sorted(unexpected_files)}: add them to OPTIMIZERS"
        )
    names = [name for name in OPTIMIZERS if name.lower() in known]
    source = "runtime/engine.py:DeepSpeedEngine._configure_basic_optimizer"
    yield (
        "optimizer.type",
        {
            "type": "string",
            "examples": names,
            "any_case": True,
            "reader": "recorded",
            "source": "runtime/config.py:get_optimizer_name",
        },
    )
    for name in names:
        section = f"optimizer.params[{name}]"
        unknown = "ignored" if name == "Muon" else "error"
        yield section, {"type": "object", "unknown": unknown, "reader": "source", "source": source}
        yield (
            f"{section}.max_grad_norm",
            {"type": "number", "status": "refused", "reader": "source", "source": source},
        )
        for key, entry in _optimizer_parameters(name, source):
            yield f"{section}.{key}", entry
    for name in REMOVED_OPTIMIZERS:
        if name not in names:
            yield (
                f"optimizer.params[{name}]",
                {"type": "any", "status": "refused", "reader": "source", "source": source},
            )


def _optimizer_parameters(name: str, source: str) -> Iterator[tuple[str, Entry]]:
    """Parameters of all classes behind one type; those that not every class takes say which ones
    do.
    """
    classes: dict[str, dict[str, Entry]] = {}
    for path in OPTIMIZERS[name]:
        parameters = dict(signature_of(path, skip=_POSITIONAL))
        if parameters:
            classes[path.partition(":")[2]] = parameters
    for path, defaults in TORCH_CLASSES.get(name, ()):
        classes[path] = {
            key: {
                **({"required": True} if value is _NEEDED else {"default": value}),
                "reader": "signature",
                "source": path,
            }
            for key, value in defaults.items()
        }
    taken = dict(_taken_by_engine(name, source))
    merged: dict[str, Entry] = {}
    for parameters in classes.values():
        for key, entry in parameters.items():
            merged.setdefault(key, entry)
    for key, entry in merged.items():
        takers = [cls for cls, parameters in classes.items() if key in parameters]
        if key not in taken and len(takers) < len(classes):
            entry["taken_by"] = takers
        yield key, entry
    yield from taken.items()


def _taken_by_engine(name: str, source: str) -> Iterator[tuple[str, Entry]]:
    """Parameters that the engine takes out before it calls the class."""
    if name in ("Adam", "AdamW", "Muon"):
        for function in ("_configure_basic_optimizer", "get_optimizer_configuration"):
            for key, entry in reads_of(
                "runtime.engine", {"optimizer_parameters": ""}, inside=function
            ):
                if key not in ("max_grad_norm", "*", "foreach") and not (
                    name == "Muon" and key.endswith("_lr")
                ):
                    yield (
                        key,
                        {
                            **entry,
                            "source": source if function.startswith("_") else entry["source"],
                        },
                    )
    if name == "Muon":
        functions, constants = (
            ("_configure_basic_optimizer",),
            ("_MUON_HALF_KEYS", "_ADAM_HALF_KEYS"),
        )
        keys = listed_strings("runtime.engine", functions, constants)
        keys += [key for key in ("muon_lr", "adam_lr") if _engine_names(key)]
        for key in dict.fromkeys(keys):
            yield key, {"reader": "source", "source": source}
        for key, entry in reads_of(
            "__init__", {"getattr(config_class, 'optimizer_params', None) or {}": ""}
        ):
            yield key, entry


def _engine_names(text: str) -> bool:
    import inspect

    return f'"{text}"' in inspect.getsource(importlib.import_module("deepspeed.runtime.engine"))


def schedulers() -> Iterator[tuple[str, Entry]]:
    """DeepSpeed's schedules and their parameters."""
    module = importlib.import_module("deepspeed.runtime.lr_schedules")
    names = list(module.VALID_LR_SCHEDULES)
    yield (
        "scheduler.type",
        {
            "type": "string",
            "examples": names,
            "reader": "recorded",
            "source": "runtime/config.py:get_scheduler_name",
        },
    )
    for name in names:
        section = f"scheduler.params[{name}]"
        yield (
            section,
            {
                "type": "object",
                "unknown": "error",
                "reader": "signature",
                "source": f"runtime/lr_schedules.py:{name}",
            },
        )
        for key, entry in signature_of(f"runtime.lr_schedules:{name}", skip=_POSITIONAL):
            yield f"{section}.{key}", entry
