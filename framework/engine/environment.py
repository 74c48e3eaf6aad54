"""Facts of the machine and its software, for ``environment.json``. No environment variables: they may hold secrets."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

_PACKAGES = ("dsf-trainer", "torch", "torchvision", "deepspeed", "pydantic", "numpy", "tensorboard")


@cache
def describe_environment() -> dict[str, Any]:
    """Versions, device and host of rank 0."""
    accelerator = get_accelerator()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "accelerator": accelerator._name,
        "device": torch.cuda.get_device_name() if accelerator._name == "cuda" else _processor(),
        "devices_on_host": accelerator.device_count(),
        "cuda": torch.version.cuda,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "command": sys.argv,
    }


def _processor() -> str:
    """Model name of the processor, as Linux reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
