"""Compiled ops of DeepSpeed that a run loads, and their folder: known from its JSON and the device
alone.

torch compiles an op at its first use, which takes the compiler, ninja and Python's headers. What is
compiled already is found again, and then only ninja must be there (torch 2.15 and DeepSpeed 0.19.8
ask for it either way); an op for NVIDIA GPUs asks nvcc for its release each time
(op_builder/builder.py `installed_cuda_version`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import Problem
from framework.plan.cluster import Device


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: DeepSpeed's name, which is also that of its folder in the cache.
        reason: what of the run config needs it.
        needs_nvcc: whether CUDA's compiler is asked for it.
        library: a system library that it is linked with, such as ``aio``.
    """

    name: str
    reason: str
    needs_nvcc: bool = False
    library: str | None = None


def needed_ops(ds_config: Mapping[str, Any], *, device: Device) -> tuple[Op, ...]:
    """The ops that DeepSpeed 0.19.8 loads for this JSON; nothing for devices other than NVIDIA GPUs
    and processors.
    """
    if device not in ("cuda", "cpu"):
        return ()
    zero = ds_config.get("zero_optimization") or {}
    devices = {
        key: (zero.get(key) or {}).get("device", "none")
        for key in ("offload_optimizer", "offload_param")
    }
    if device == "cpu":
        named = {"deepspeed_shm_comm": "ranks on processors talk through shared memory"}
    else:
        named = {}
    on_host = devices["offload_optimizer"] in ("cpu", "nvme")
    named |= _op_of_optimizer(ds_config.get("optimizer") or {}, on_host=on_host)
    for key, where in devices.items():
        if where == "nvme":
            named |= dict.fromkeys(("pin_memory", "async_io"), f"zero.{key}.device is nvme")
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            named["quantizer"] = f"{key} is on"
    # Built where CUDA is, every op is a CUDAOpBuilder, those for the host's optimizers and its
    # disks as well.
    return tuple(
        Op(name, reason, device == "cuda", "aio" if name == "async_io" else None)
        for name, reason in named.items()
    )


def _op_of_optimizer(optimizer: Mapping[str, Any], *, on_host: bool) -> dict[str, str]:
    """As runtime/engine.py `_configure_basic_optimizer` chooses."""
    kind = str(optimizer.get("type", "")).lower()
    prefix = "cpu" if on_host else "fused"
    if kind in ("adam", "adamw") and not (optimizer.get("params") or {}).get("torch_adam", False):
        return {f"{prefix}_adam": "optimizer.implementation is deepspeed"}
    if kind == "adagrad" and on_host:
        return {"cpu_adagrad": "optimizer.kind is adagrad, on the host"}
    if kind in ("lion", "lamb"):
        return {f"{prefix if kind == 'lion' else 'fused'}_{kind}": f"optimizer.kind is {kind}"}
    return {}


def lost_gradients(torch_version: str) -> Problem | None:
    """Refuse torch.compile of a release that drops, without an error, the gradients of every
    autograd.Function that writes its output in place; None for all others.
    """
    if not torch_version.startswith("2.11."):
        return None
    reason = (
        "torch 2.11 compiles an autograd.Function that writes its output in place into one "
        "without gradients, and reports no error; sums over ranks are such, and a model may have "
        "others"
    )
    fix = "install torch 2.12 or newer, or set training.compile: false"
    return Problem("compile-loses-gradients", reason, fix, "training.compile", True)


def missing_compiler(device: Device, environment: Mapping[str, str]) -> Problem | None:
    """The compiler of torch.compile's inductor, where it is not here: for processors C++
    (torch/_inductor/config.py `cpp.cxx`), elsewhere C for what starts Triton's kernels
    (triton/runtime/build.py `_find_compiler`).
    """
    variable, names = ("CXX", ["g++"]) if device == "cpu" else ("CC", ["gcc", "clang"])
    if environment.get(variable):
        names = environment[variable].split()[:1]
    else:
        names = names
    if any(shutil.which(name, path=environment.get("PATH")) for name in names):
        return None
    reason = (
        f"its backend inductor needs a compiler, and {' or '.join(names)} is not on this machine"
    )
    fix = f"install it, name another in {variable}, or set training.compile: false"
    return Problem("compiler-missing", reason, fix, "training.compile", True)


def path_of_compilers(environment: Mapping[str, str]) -> str:
    """Return PATH with this Python's own programs first, its ninja among them, as an active
    environment has it.
    """
    own = sysconfig.get_path("scripts")
    path = environment.get("PATH") or os.defpath
    if path.split(os.pathsep)[0] == own:
        return path
    return os.pathsep.join((own, path))


def extensions_folder(environment: Mapping[str, str], *, torch_version: str) -> Path:
    """Return the folder of compiled ops: TORCH_EXTENSIONS_DIR, or one folder for each environment
    and each ninja.

    torch's default folder is shared by all environments of a user, but what is built names the
    include paths of one of them. Two environments in use would compile the same op again and again,
    and wait for each other's lock meanwhile. So would two releases of ninja (1.11 and 1.13, say),
    which do not know each other's commands again: torch calls the first on the path that
    `path_of_compilers` sets, which is the same whether or not the environment is active.
    """
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    ninja = shutil.which("ninja", path=path_of_compilers(environment))
    described = f"{sys.prefix} {torch_version} {platform.python_version()} {ninja}"
    key = hashlib.sha256(described.encode()).hexdigest()[:12]
    return cache_folder(environment) / "torch_extensions" / f"dsf-{key}"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the user's folder for what can be made again."""
    home = environment.get("HOME")
    return Path(
        environment.get("XDG_CACHE_HOME") or (Path(home) if home else Path.home()) / ".cache"
    )
