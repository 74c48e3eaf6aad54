"""Rates that `plan --measure` found on this machine: kept in the user's cache, for later plans of as many ranks."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import framework
from framework.plan.compiled_ops import cache_folder
from framework.system.files import replace_text

# Device files of drivers of accelerators: NVIDIA's, AMD's, Huawei's.
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager")


def identity(num_ranks: int) -> dict[str, Any]:
    """What rates depend on beside the code that found them: host, kind of device, versions, ranks at work together."""
    versions = {"framework": framework.__version__}
    for name in ("torch", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "host": socket.gethostname(),
        "processor": f"{platform.machine()} x {os.cpu_count()}",
        "is_cpu": os.environ.get("DS_ACCELERATOR", "" if any(map(os.path.exists, _DRIVERS)) else "cpu") == "cpu",
        "versions": versions,
        "num_ranks": num_ranks,
    }


def path_of(num_ranks: int) -> Path:
    """File of the rates of this machine with so many ranks."""
    key = hashlib.sha256(json.dumps(identity(num_ranks), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder(os.environ) / "dsf-trainer" / f"rates-{key}.json"


def keep(found: Mapping[str, Any], num_ranks: int) -> Path:
    """Write what was measured; returns the file."""
    path = path_of(num_ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(dict(found) | {"identity": identity(num_ranks)}, indent=2) + "\n")
    return path


def measured_rates(num_ranks: int) -> dict[str, Any] | None:
    """Return what was measured on this machine with so many ranks; None where nothing was."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path_of(num_ranks).read_text(encoding="utf-8"))
        return found
    return None
