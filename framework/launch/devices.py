"""Which devices this machine has, found without importing torch: that would take seconds before the first message."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from framework.errors import ConfigError, Problem
from framework.plan.cluster import Device

_VISIBLE: Final[Mapping[Device, str]] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
# Enough to show that ranks work together, and no more than a laptop has cores.
RANKS_ON_CPU: Final = 2
# A driver that hangs must not hang us; on hosts with eight GPUs and no persistence daemon a second or two is normal.
_PROBE_TIMEOUT_SECONDS: Final = 20


@dataclass(frozen=True)
class LocalDevices:
    """What training can use here.

    Attributes:
        kind: ``cuda``, ``npu``, or ``cpu`` where there is nothing else.
        count: how many; 0 on a machine with processors only, and where nothing can be known (``DS_ACCELERATOR=xpu``).
        chosen: the device numbers that the user's ``*_VISIBLE_DEVICES`` names, in that order; None: all of them.
    """

    kind: Device
    count: int
    chosen: tuple[int, ...] | None = None


def find_devices(environment: Mapping[str, str]) -> LocalDevices:
    """Devices of the kind that DeepSpeed will choose: DS_ACCELERATOR if set, else Ascend, else CUDA, else CPU.

    Raises:
        ConfigError: the environment asks for devices that are not here, or in a way that DeepSpeed cannot follow.
    """
    asked = environment.get("DS_ACCELERATOR", "")
    if not asked:
        return _visible("npu", count_npus(), environment) or _visible("cuda", count_gpus(), environment) or LocalDevices("cpu", 0)
    if asked not in ("cuda", "npu"):
        return LocalDevices(asked if asked in get_args(Device) else "unknown", 0)  # type: ignore[arg-type]
    found = _visible("cuda", count_gpus(), environment) if asked == "cuda" else _visible("npu", count_npus(), environment)
    if found is None:
        raise ConfigError(
            Problem(kind="no-device", file="environment", key="DS_ACCELERATOR", value=asked,
                    reason=f"this process sees no {asked} device", fix="unset it, or DS_ACCELERATOR=cpu to train on processors")
        )  # fmt: skip
    return found


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    program = shutil.which("nvidia-smi")
    if program:
        # Under cgroups (Slurm, containers) it lists what is allowed; /dev may show more.
        try:
            listed = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return _count_nodes("nvidia")
        return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
    return _count_nodes("nvidia")


def count_npus() -> int:
    """Ascend devices."""
    return _count_nodes("davinci")


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_nodes(prefix: str) -> int:
    return sum(1 for path in Path("/dev").glob(f"{prefix}*") if re.fullmatch(rf"{prefix}\d+", path.name))


def _visible(kind: Device, count: int, environment: Mapping[str, str]) -> LocalDevices | None:
    """What the user left visible of the devices that are here; None: nothing."""
    name = _VISIBLE[kind]
    text = environment.get(name)
    if not count or text is None:
        return LocalDevices(kind, count) if count else None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or words == ["-1"]:  # the usual ways to hide all of them
        return None
    numbers = [int(word) for word in words if re.fullmatch("[0-9]{1,4}", word)]
    if len(numbers) < len(words) or len(set(numbers)) < len(numbers) or max(numbers) >= count:
        raise ConfigError(
            Problem(kind="visible-devices", file="environment", key=name, value=text,
                    reason=f"the deepspeed launcher takes device numbers here, from 0 to {count - 1}, each once",
                    fix="write numbers separated by commas, or start with torchrun, which takes any form")
        )  # fmt: skip
    return LocalDevices(kind, len(numbers), tuple(numbers))
