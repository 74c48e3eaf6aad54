"""Devices of this machine and its packages, without an import of torch, which takes seconds."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, get_args

from framework.errors import ConfigError, Problem
from framework.plan.cluster import Device


def torch_text(name: str) -> str | None:
    """Return a text of torch's version.py, such as ``cuda``; None if it is not one, or no torch."""
    folder = package_folder("torch")
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{re.escape(name)}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return match[1] if match else None


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package; finding one without dots imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec and spec.origin:
        return Path(spec.origin).parent
    return None


# Variables that hide devices from a process, by the kinds that DeepSpeed drives (its accelerators'
# visible_devices_envs).
_VISIBLE: Final[Mapping[str, str]] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
}
# For AMD's GPUs these come first: CUDA_VISIBLE_DEVICES numbers the devices that they leave.
_VISIBLE_ON_AMD: Final = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_DEV: Final = Path("/dev")
_KFD_NODES: Final = Path("/sys/class/kfd/kfd/topology/nodes")
# Device files of GPUs that torch may reach although no list has them: under WSL, on Jetson, or of
# AMD's GPUs in a container without /sys.
_GPU_FILES: Final = ("kfd", "dxg", "nvmap", "nvhost-gpu")
# A driver that hangs must not hang us; on hosts with eight GPUs and no persistence daemon a second
# or two is normal.
_PROBE_TIMEOUT_SECONDS: Final = 20
_LONGEST_MESSAGE: Final = 200


@dataclass(frozen=True)
class LocalDevices:
    """Devices that training can use here.

    Attributes:
        kind: ``cuda``, ``npu``, or ``cpu`` if there is no accelerator.
        count: number of devices; 0 on a machine with processors only, and for kinds that are not
            counted (``xpu``).
        chosen: the device numbers that the user's ``*_VISIBLE_DEVICES`` names, in that order; None:
            all of them.
    """

    kind: Device
    count: int
    chosen: tuple[int, ...] | None = None

    def only(self, numbers: tuple[int, ...] | None) -> LocalDevices:
        """Return the devices that a hostfile or an option names; None: these unchanged.

        They need not be visible by the environment.
        """
        if numbers is None:
            return self
        count = len(numbers) if self.count else 0
        return replace(self, chosen=numbers, count=count)


def devices_of_ranks(chosen: Sequence[int] | None, num_ranks: int) -> list[int]:
    """Return the device number of each rank of this machine.

    DeepSpeed's launcher sorts the numbers of ``--include`` and of ``*_VISIBLE_DEVICES`` (0.19.8,
    launcher/runner.py, `parse_node_config_list`), so that rank 0 has the lowest one. Of these the
    first `num_ranks` are taken: with ``--num_gpus`` the launcher itself would drop the variable and
    take devices from 0 on, which another user may have.

    Args:
        chosen: device numbers, in any order; None: all devices.
        num_ranks: number of ranks on this machine.
    """
    if chosen is None:
        return list(range(num_ranks))
    return sorted(chosen)[:num_ranks]


def find_devices(environment: Mapping[str, str]) -> LocalDevices:
    """Return the devices of the kind that DeepSpeed will choose.

    That is DS_ACCELERATOR if set, else Ascend, CUDA (ROCm's, too), XPU, HPU, else CPU.

    Raises:
        ConfigError: the environment requests devices that are not here, or in a way that DeepSpeed
            does not support.
    """
    requested = environment.get("DS_ACCELERATOR", "")
    if not requested:
        return (
            _visible_devices("npu", count_npus(), environment)
            or _visible_devices("cuda", count_gpus(), environment)
            or _other_gpus(environment)
            or LocalDevices("cpu", 0)
        )
    if requested in ("cuda", "npu"):
        return _requested_devices(requested, environment)
    kind = requested if requested in get_args(Device) else "unknown"
    return LocalDevices(kind, 0)  # type: ignore[arg-type]


def _requested_devices(requested: str, environment: Mapping[str, str]) -> LocalDevices:
    """Return the devices of the kind that DS_ACCELERATOR names, ``cuda`` or ``npu``.

    Raises:
        ConfigError: kind ``no-device``: this process sees none.
    """
    if requested == "npu":
        devices = _visible_devices("npu", count_npus(), environment)
    else:
        devices = _requested_gpus(environment)
    if devices is None:
        reason = f"this process sees no {requested} device"
        smi_error = _nvidia_smi_error()
        if requested == "cuda" and smi_error:
            reason += f", as nvidia-smi fails: {smi_error}"
        fix = "unset it, or DS_ACCELERATOR=cpu to train on processors"
        raise ConfigError.of(
            "no-device", reason, fix, key="DS_ACCELERATOR", value=requested, file="environment"
        )
    return devices


def _requested_gpus(environment: Mapping[str, str]) -> LocalDevices | None:
    """Return NVIDIA's or AMD's GPUs, for a user who wants them; None if there are none.

    Where only a device file shows that there are some, their count is 0: they are not counted.
    """
    count = count_gpus() or count_amd_gpus(environment)
    devices = _visible_devices("cuda", count, environment)
    if not count and any((_DEV / name).exists() for name in _GPU_FILES):
        return LocalDevices("cuda", 0)
    return devices


class _SmiList(NamedTuple):
    """Answer of ``nvidia-smi -L``: the number of GPUs, and its message if it fails."""

    num_gpus: int
    error: str = ""


def count_gpus() -> int:
    """Count the NVIDIA GPUs that this process may use; 0 if `nvidia-smi` fails."""
    listed = _list_gpus()
    if listed is None:
        return _count_device_files("nvidia")
    return listed.num_gpus


def _nvidia_smi_error() -> str:
    """Return the message of an `nvidia-smi` that fails; empty if it is not installed, or works."""
    listed = _list_gpus()
    if listed is None:
        return ""
    return listed.error


def _list_gpus() -> _SmiList | None:
    """Return the answer of `nvidia-smi`; None if it is not installed, or does not end in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        # Under cgroups (Slurm, containers) it lists the GPUs that are allowed; /dev may have more.
        listed = subprocess.run(
            [program, "-L"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    count = len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
    if listed.returncode == 0:
        return _SmiList(count)
    message = " ".join(f"{listed.stdout} {listed.stderr}".split())  # it may fill several lines
    if not message:
        message = f"exit code {listed.returncode}"
    return _SmiList(count, message[:_LONGEST_MESSAGE])


def count_amd_gpus(environment: Mapping[str, str]) -> int:
    """Count AMD's GPUs, which ROCm's torch calls cuda.

    They are in the driver's list, and this process may open their files (as `rocm-smi` counts).
    """
    if not (_DEV / "kfd").exists():
        return 0
    count = sum(map(_is_usable_amd_gpu, _KFD_NODES.glob("*/properties")))
    for name in _VISIBLE_ON_AMD:  # CUDA_VISIBLE_DEVICES counts what these leave from 0
        words = environment.get(name, "").split(",")
        if words == ["-1"]:
            count = 0
        elif words != [""]:
            count = min(count, len(words))
    return count


def _is_usable_amd_gpu(file: Path) -> bool:
    """Check whether a file of properties is a GPU's, with a device that this process may open."""
    try:
        text = file.read_text()
    except OSError:  # of a device that the container was not given
        return False
    properties = dict(re.findall(r"^(simd_count|drm_render_minor) (\d+)$", text, re.MULTILINE))
    device = _DEV / f"dri/renderD{properties.get('drm_render_minor', 0)}"
    is_gpu = properties.get("simd_count", "0") != "0"
    return is_gpu and os.access(device, os.R_OK | os.W_OK)


def unused_gpus(devices: LocalDevices, environment: Mapping[str, str]) -> Problem | None:
    """Return a warning of GPUs that stay idle while processors train: NVIDIA's for which
    `nvidia-smi` fails, or AMD's for which this torch is not built.
    """
    if devices.kind != "cpu" or environment.get("DS_ACCELERATOR"):
        return None
    smi_error = _nvidia_smi_error()
    if smi_error:
        reason = f"nvidia-smi fails, so that no GPU is used here: {smi_error}"
        fix = "repair the driver, or DS_ACCELERATOR=cpu if that is meant"
        return Problem("gpus-unused", reason, fix, severity="warning")
    return _unused_amd_gpus(count_amd_gpus(environment))


def _unused_amd_gpus(count: int) -> Problem | None:
    """Return a warning of this many GPUs of AMD's, if this torch is not built for them."""
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
    """Return the devices that DeepSpeed takes without Ascend and NVIDIA, by the build of torch."""
    if (_DEV / "kfd").exists() and torch_text("hip"):
        return _visible_devices("cuda", count_amd_gpus(environment), environment)
    if any(_DEV.glob("dri/renderD*")) and torch_text("xpu"):
        return LocalDevices("xpu", 0)
    if any(_DEV.glob("accel/accel*")) and package_folder("habana_frameworks"):
        return LocalDevices("hpu", 0)
    return None


def count_npus() -> int:
    """Count the Ascend devices."""
    return _count_device_files("davinci")


def visible_variable(kind: str) -> str:
    """Return the variable that makes devices of this kind visible; CUDA's for unknown kinds."""
    return _VISIBLE.get(kind, _VISIBLE["cuda"])


def usable_cores() -> int:
    """Count the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_device_files(prefix: str) -> int:
    count = 0
    for path in _DEV.glob(f"{prefix}*"):
        if re.fullmatch(rf"{prefix}\d+", path.name):
            count += 1
    return count


def _visible_devices(
    kind: Device, count: int, environment: Mapping[str, str]
) -> LocalDevices | None:
    """Return the devices that the environment leaves visible, of `count`; None if there are none.

    Raises:
        ConfigError: the variable holds anything but device numbers.
    """
    name = visible_variable(kind)
    text = environment.get(name)
    if not count:
        return None
    if text is None:
        return LocalDevices(kind, count)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or words == ["-1"]:  # the usual ways to hide all of them
        return None
    if _are_device_numbers(words, count):
        return LocalDevices(kind, len(words), tuple(map(int, words)))
    reason = f"the deepspeed launcher takes device numbers here, from 0 to {count - 1}, each once"
    fix = "write numbers separated by commas, or start with torchrun, which takes any form"
    raise ConfigError.of("visible-devices", reason, fix, key=name, value=text, file="environment")


def _are_device_numbers(words: Sequence[str], count: int) -> bool:
    """Check whether these are different numbers below `count`."""
    if not all(re.fullmatch("[0-9]{1,4}", word) for word in words):
        return False
    numbers = set(map(int, words))
    return len(numbers) == len(words) and max(numbers) < count
