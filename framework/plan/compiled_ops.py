"""Compiled ops of DeepSpeed that a run loads: known from its JSON and the device alone.

torch compiles an op at its first use, which takes the compiler, ninja and Python's headers. A
compiled op is found again, and then only ninja must be there (torch 2.15 and DeepSpeed 0.19.8
require it either way); an op for NVIDIA GPUs runs nvcc to get its release each time
(op_builder/builder.py `installed_cuda_version`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import Problem
from framework.plan.cluster import Device


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: DeepSpeed's name, which is also the name of its folder in the cache.
        reason: the setting of the run config that needs it.
        needs_nvcc: whether CUDA's compiler is run for it.
        library: a system library that it is linked with, such as ``aio``.
    """

    name: str
    reason: str
    needs_nvcc: bool = False
    library: str | None = None


def needed_ops(ds_config: Mapping[str, Any], *, device: Device) -> tuple[Op, ...]:
    """Return the ops that DeepSpeed 0.19.8 loads for this JSON; none for devices other than NVIDIA
    GPUs and CPUs.
    """
    if device not in ("cuda", "cpu"):
        return ()
    reasons = {}
    if device == "cpu":
        reasons["deepspeed_shm_comm"] = "ranks on processors talk through shared memory"
    reasons |= _ops_of_settings(ds_config)
    ops = []
    for name, reason in reasons.items():
        # On a machine with CUDA every op is a CUDAOpBuilder, also an op for the host's optimizers
        # and disks.
        library = "aio" if name == "async_io" else None
        ops.append(Op(name, reason, needs_nvcc=device == "cuda", library=library))
    return tuple(ops)


def _ops_of_settings(ds_config: Mapping[str, Any]) -> dict[str, str]:
    """Map the ops that the optimizer and ZeRO need to the reasons."""
    zero = ds_config.get("zero_optimization") or {}
    on_host = _offload_device(zero, "offload_optimizer") in ("cpu", "nvme")
    reasons = _op_of_optimizer(ds_config.get("optimizer") or {}, on_host=on_host)
    if (ds_config.get("compile") or {}).get("deepcompile"):
        reasons["dc"] = "training.compile.backend is deepcompile"
    return reasons | _ops_of_zero(zero)


def _offload_device(zero: Mapping[str, Any], key: str) -> Any:
    return (zero.get(key) or {}).get("device", "none")


def _ops_of_zero(zero: Mapping[str, Any]) -> dict[str, str]:
    """Map the ops for NVMe and for quantized values to the reasons."""
    reasons = {}
    for key in ("offload_optimizer", "offload_param"):
        if _offload_device(zero, key) == "nvme":
            reasons["pin_memory"] = f"zero.{key}.device is nvme"
            reasons["async_io"] = f"zero.{key}.device is nvme"
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            reasons["quantizer"] = f"{key} is on"
    return reasons


def _op_of_optimizer(optimizer: Mapping[str, Any], *, on_host: bool) -> dict[str, str]:
    """Map the op that runtime/engine.py `_configure_basic_optimizer` chooses, if any, to the
    reason.
    """
    kind = str(optimizer.get("type", "")).lower()
    prefix = "cpu" if on_host else "fused"
    if kind in ("adam", "adamw") and not (optimizer.get("params") or {}).get("torch_adam", False):
        return {f"{prefix}_adam": "optimizer.implementation is deepspeed"}
    if kind == "adagrad" and on_host:
        return {"cpu_adagrad": "optimizer.kind is adagrad, on the host"}
    if kind == "lion":
        return {f"{prefix}_lion": "optimizer.kind is lion"}
    return {}


def missing_compiler(device: Device, environment: Mapping[str, str]) -> Problem | None:
    """Return a problem if the compiler of torch.compile's inductor is not here.

    For CPUs it is C++ (torch/_inductor/config.py `cpp.cxx`), elsewhere C, for the code that starts
    Triton's kernels (triton/runtime/build.py `_find_compiler`).
    """
    variable = "CC"
    names = ["gcc", "clang"]
    if device == "cpu":
        variable = "CXX"
        names = ["g++"]
    if environment.get(variable):
        names = environment[variable].split()[:1]
    if any(shutil.which(name, path=environment.get("PATH")) for name in names):
        return None
    reason = (
        f"its backend inductor needs a compiler, and {' or '.join(names)} is not on this machine"
    )
    fix = f"install it, name another in {variable}, or set training.compile: false"
    return Problem("compiler-missing", reason, fix, "training.compile", True)
