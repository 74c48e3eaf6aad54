"""Devices of this machine and installed packages, found without importing torch, which would take
seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, get_args

from framework.errors import ConfigError, Problem
from framework.plan.cluster import Device


def torch_text(name: str) -> str | None:
    """A line of torch's version.py, such as ``cuda``; None where it says None or there is no
    torch.
    """
    folder = package_folder("torch")
    found = None
    with suppress(OSError):
        if folder:
            text = (folder / "version.py").read_text(encoding="utf-8")
        else:
            text = ""
        found = re.search(rf"^{re.escape(name)}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return found[1] if found else None


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package; finding one without dots imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec and spec.origin:
        return Path(spec.origin).parent
    return None


# What hides other devices from a process, for each kind that DeepSpeed drives (its accelerators'
# visible_devices_envs).
_VISIBLE: Final[Mapping[str, str]] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
}
# The same for AMD's, numbered before that variable.
_VISIBLE_ON_AMD: Final = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_DEV: Final = Path("/dev")
_KFD_NODES: Final = Path("/sys/class/kfd/kfd/topology/nodes")
# Of GPUs that torch may reach and that are in no list: under WSL, on Jetson, or AMD's in a
# container without /sys.
_SIGNS: Final = ("kfd", "dxg", "nvmap", "nvhost-gpu")
# A driver that hangs must not hang us; on hosts with eight GPUs and no persistence daemon a second
# or two is normal.
_PROBE_TIMEOUT_SECONDS: Final = 20


@dataclass(frozen=True)
class LocalDevices:
    """Devices that training can use here.

    Attributes:
        kind: ``cuda``, ``npu``, or ``cpu`` where there is nothing else.
        count: how many; 0 on a machine with processors only, and where nobody counts (``xpu``).
        chosen: the device numbers that the user's ``*_VISIBLE_DEVICES`` names, in that order; None:
            all of them.
    """

    kind: Device
    count: int
    chosen: tuple[int, ...] | None = None

    def only(self, numbers: tuple[int, ...] | None) -> LocalDevices:
        """The devices that a hostfile or an option names, whatever the environment leaves visible;
        None: as before.
        """
        if numbers is None:
            return self
        return replace(self, chosen=numbers, count=len(numbers) if self.count else 0)


def find_devices(environment: Mapping[str, str]) -> LocalDevices:
    """Devices of the kind that DeepSpeed will choose: DS_ACCELERATOR if set, else Ascend, CUDA
    (ROCm's, too), XPU, HPU, else CPU.

    Raises:
        ConfigError: the environment asks for devices that are not here, or in a way that DeepSpeed
            cannot follow.
    """
    asked = environment.get("DS_ACCELERATOR", "")
    if not asked:
        found = _visible("npu", count_npus(), environment) or _visible(
            "cuda", count_gpus(), environment
        )
        return found or _other_gpus(environment) or LocalDevices("cpu", 0)
    if asked not in ("cuda", "npu"):
        return LocalDevices(asked if asked in get_args(Device) else "unknown", 0)  # type: ignore[arg-type]
    if asked == "npu":
        found = _visible("npu", count_npus(), environment)
    else:
        count = count_gpus() or count_amd_gpus(environment)
        found = _visible("cuda", count, environment)
        if not count and any((_DEV / name).exists() for name in _SIGNS):
            found = LocalDevices("cuda", 0)
    if found is None:
        reason = f"this process sees no {asked} device"
        fix = "unset it, or DS_ACCELERATOR=cpu to train on processors"
        raise ConfigError.of(
            "no-device", reason, fix, key="DS_ACCELERATOR", value=asked, file="environment"
        )
    return found


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    program = shutil.which("nvidia-smi")
    # Under cgroups (Slurm, containers) it lists what is allowed; /dev may show more.
    with suppress(OSError, subprocess.TimeoutExpired):
        if program:
            command = [program, "-L"]
            limit = _PROBE_TIMEOUT_SECONDS
            listed = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False
            )
            return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
    return _count_nodes("nvidia")


def count_amd_gpus(environment: Mapping[str, str]) -> int:
    """AMD's, which ROCm's torch calls cuda: of the driver's list those whose files this process has
    (`rocm-smi`).
    """
    found = 0
    for file in _KFD_NODES.glob("*/properties") if (_DEV / "kfd").exists() else ():
        with suppress(OSError):  # of a device that the container was not given
            values = dict(
                re.findall(r"^(simd_count|drm_render_minor) (\d+)$", file.read_text(), re.MULTILINE)
            )
            is_gpu = values.get("simd_count", "0") != "0"
            found += is_gpu and os.access(
                _DEV / f"dri/renderD{values.get('drm_render_minor', 0)}", os.R_OK | os.W_OK
            )
    for name in _VISIBLE_ON_AMD:  # these leave what CUDA_VISIBLE_DEVICES then counts from 0
        words = environment.get(name, "").split(",")
        if words == [""]:
            found = found
        else:
            found = min(found, len(words) if words != ["-1"] else 0)
    return found


def unused_gpus(devices: LocalDevices, environment: Mapping[str, str]) -> Problem | None:
    """AMD's GPUs that stay idle because this torch is none of ROCm's."""
    asked = devices.kind != "cpu" or environment.get("DS_ACCELERATOR")
    if asked:
        count = 0
    else:
        count = count_amd_gpus(environment)
    if not count or torch_text("hip"):
        return None
    if count == 1:
        gpus = "an AMD GPU"
    else:
        gpus = f"{count} AMD GPUs"
    reason = f"{gpus} here, and this torch computes on processors only"
    fix = "install a ROCm build of torch, or DS_ACCELERATOR=cpu if that is meant"
    return Problem("gpus-unused", reason, fix, severity="warning")


def _other_gpus(environment: Mapping[str, str]) -> LocalDevices | None:
    """Find the devices that DeepSpeed takes where there is neither Ascend nor NVIDIA, by the build
    of this torch.
    """
    if (_DEV / "kfd").exists() and torch_text("hip"):
        return _visible("cuda", count_amd_gpus(environment), environment)
    if any(_DEV.glob("dri/renderD*")) and torch_text("xpu"):
        return LocalDevices("xpu", 0)
    if any(_DEV.glob("accel/accel*")) and package_folder("habana_frameworks"):
        return LocalDevices("hpu", 0)
    return None


def count_npus() -> int:
    """Ascend devices."""
    return _count_nodes("davinci")


def visible_variable(kind: str) -> str:
    """The variable that names the devices of this kind that a process may use; DeepSpeed's other
    kinds go by CUDA's.
    """
    return _VISIBLE.get(kind, _VISIBLE["cuda"])


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_nodes(prefix: str) -> int:
    return sum(1 for path in _DEV.glob(f"{prefix}*") if re.fullmatch(rf"{prefix}\d+", path.name))


def _visible(kind: Device, count: int, environment: Mapping[str, str]) -> LocalDevices | None:
    """Return the devices that the environment leaves visible; None: there are none, or all are
    hidden.
    """
    name = visible_variable(kind)
    text = environment.get(name)
    if not count or text is None:
        if count:
            return LocalDevices(kind, count)
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or words == ["-1"]:  # the usual ways to hide all of them
        return None
    numbers = [int(word) for word in words if re.fullmatch("[0-9]{1,4}", word)]
    if len(numbers) < len(words) or len(set(numbers)) < len(numbers) or max(numbers) >= count:
        reason = (
            f"the deepspeed launcher takes device numbers here, from 0 to {count - 1}, each once"
        )
        fix = "write numbers separated by commas, or start with torchrun, which takes any form"
        raise ConfigError.of(
            "visible-devices", reason, fix, key=name, value=text, file="environment"
        )
    return LocalDevices(kind, len(numbers), tuple(numbers))
