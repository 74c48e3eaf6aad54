"""Figures that `plan` measured on this machine, kept in the user's cache: rates, for later plans of
as many ranks, and memory of the user's own optimizers, until their code changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import machinery, metadata
from pathlib import Path
from typing import Any, Final

import framework
from framework.config.base import Target
from framework.plan.compiled_ops import cache_folder
from framework.system.files import replace_text

# Device files of drivers of accelerators: NVIDIA's, AMD's, Huawei's.
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager")
# More files are no project's own code, and looking at them would take longer than what they are
# asked for.
_MOST_FILES: Final = 5_000


def identity(num_ranks: int) -> dict[str, Any]:
    """What rates depend on beside the code that found them: host, kind of device, versions, ranks
    at work together.
    """
    versions = {"framework": framework.__version__}
    for name in ("torch", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "host": socket.gethostname(),
        "processor": f"{platform.machine()} x {os.cpu_count()}",
        "is_cpu": os.environ.get(
            "DS_ACCELERATOR", "" if any(map(os.path.exists, _DRIVERS)) else "cpu"
        )
        == "cpu",
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


@dataclass(frozen=True)
class OptimizerState:
    """Memory of an optimizer for each element that it steps.

    Attributes:
        bytes_per_element: of what it keeps from step to step.
        copies_per_element: of what it takes while it steps, the gradient not counted.
    """

    bytes_per_element: float
    copies_per_element: int = 0


@lru_cache(maxsize=8)  # a search asks for every candidate; `state_file` says where the answer is
def _kept(path: Path) -> OptimizerState | None:
    with suppress(OSError, ValueError, TypeError):
        return OptimizerState(**json.loads(path.read_text(encoding="utf-8")))
    return None


def kept_state(optimizer: Target) -> OptimizerState | None:
    """Return what `plan` measured of the user's own optimizer; None where nothing was, or where its
    code has changed.

    `keep_state` writes it.
    """
    path = state_file(optimizer.target, json.dumps(optimizer.args, sort_keys=True, default=str))
    if path is None:
        return None
    return _kept(path)


def keep_state(optimizer: Target, state: OptimizerState) -> None:
    """Keep what was measured of the user's own optimizer; without a place for it, for this process
    alone.
    """
    path = state_file(optimizer.target, json.dumps(optimizer.args, sort_keys=True, default=str))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(state)))
        _kept.cache_clear()


@lru_cache(maxsize=8)
def state_file(target: str, arguments: str) -> Path | None:
    """Place of the state of an optimizer, by a hash of its code; None where that is not found."""
    with suppress(OSError, LookupError):
        known = json.dumps(
            [target, arguments, list(code_of(target)), identity(1)["versions"]], sort_keys=True
        )
        name = f"{hashlib.sha256(known.encode()).hexdigest()}.json"
        return cache_folder(os.environ) / "dsf-trainer" / "optimizers" / name
    return None


def code_of(target: str) -> list[tuple[str, int, int]]:
    """Files of a target's code: of its package, or those beside a module that is in none. Nothing
    is imported.

    Raises:
        LookupError: it is not found, or is too much.
    """
    first = target.partition(":")[0].partition(".")[0]
    spec = machinery.PathFinder.find_spec(
        first, [os.getcwd(), str(Path(framework.__file__).parents[1]), *sys.path]
    )
    if spec is None or spec.origin is None:
        raise LookupError(first)
    return list(stamps_of(Path(spec.origin).parent))


def stamps_of(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of the Python files below a folder, in order of names."""
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            count = count + 1
            if count > _MOST_FILES:
                raise LookupError(folder)
            found = Path(place, name).stat()
            yield f"{place}/{name}", found.st_size, found.st_mtime_ns
