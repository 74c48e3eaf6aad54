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
from dataclasses import asdict
from functools import lru_cache
from importlib import machinery, metadata
from pathlib import Path
from typing import Any, Final

import framework
from framework.config.base import Factory
from framework.plan.optimizer_state import OptimizerState
from framework.system.cache_folders import cache_folder
from framework.system.files import replace_text

# Device files of drivers of accelerators: NVIDIA's, AMD's, Huawei's.
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager")
# More files are no project's own code, and reading their times would take longer than measuring.
_MOST_FILES: Final = 5_000


def identity(num_ranks: int) -> dict[str, Any]:
    """Return what rates depend on beside the code that measures them: host, kind of device,
    versions, ranks at work together.
    """
    versions = {"framework": framework.__version__}
    for name in ("torch", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    has_driver = any(map(os.path.exists, _DRIVERS))
    accelerator = os.environ.get("DS_ACCELERATOR", "" if has_driver else "cpu")
    return {
        "host": socket.gethostname(),
        "processor": f"{platform.machine()} x {os.cpu_count()}",
        "is_cpu": accelerator == "cpu",
        "versions": versions,
        "num_ranks": num_ranks,
    }


def path_of(num_ranks: int) -> Path:
    """Return the file of the rates of this machine with a number of ranks."""
    text = json.dumps(identity(num_ranks), sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_folder(os.environ) / "dsf-trainer" / f"rates-{key}.json"


def keep(rates: Mapping[str, Any], num_ranks: int) -> Path:
    """Write measured rates with the `identity` of this machine; return the file."""
    path = path_of(num_ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = dict(rates) | {"identity": identity(num_ranks)}
    replace_text(path, json.dumps(contents, indent=2) + "\n")
    return path


def measured_rates(num_ranks: int) -> dict[str, Any] | None:
    """Return the rates that were measured on this machine with a number of ranks, or None."""
    with suppress(OSError, ValueError):
        rates: dict[str, Any] = json.loads(path_of(num_ranks).read_text(encoding="utf-8"))
        return rates
    return None


@lru_cache(maxsize=8)  # a search reads it for every candidate
def _read_state(path: Path) -> OptimizerState | None:
    with suppress(OSError, ValueError, TypeError):
        return OptimizerState(**json.loads(path.read_text(encoding="utf-8")))
    return None


def kept_state(optimizer: Factory) -> OptimizerState | None:
    """Return the state that `plan` measured of the user's own optimizer (`keep_state`); None if it
    has not, or if the optimizer's code has changed.
    """
    path = state_file(optimizer.path, json.dumps(optimizer.kwargs, sort_keys=True, default=str))
    if path is None:
        return None
    return _read_state(path)


def keep_state(optimizer: Factory, state: OptimizerState) -> None:
    """Keep the measured state of the user's own optimizer, if its code is found."""
    path = state_file(optimizer.path, json.dumps(optimizer.kwargs, sort_keys=True, default=str))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(state)))
        _read_state.cache_clear()


@lru_cache(maxsize=8)
def state_file(target: str, arguments: str) -> Path | None:
    """Return the file of an optimizer's state, by a hash of its code; None if that is not found."""
    with suppress(OSError, LookupError):
        facts = [target, arguments, list(code_of(target)), identity(1)["versions"]]
        known = json.dumps(facts, sort_keys=True)
        name = f"{hashlib.sha256(known.encode()).hexdigest()}.json"
        return cache_folder(os.environ) / "dsf-trainer" / "optimizers" / name
    return None


def code_of(target: str) -> list[tuple[str, int, int]]:
    """Return the files of a target's code, as `stamps_of` does: of its package, or beside a module
    that is in no package. Nothing is imported.

    Raises:
        LookupError: the code is not found, or has too many files.
    """
    first = target.partition(":")[0].partition(".")[0]
    project = str(Path(framework.__file__).parents[1])
    spec = machinery.PathFinder.find_spec(first, [os.getcwd(), project, *sys.path])
    if spec is None or spec.origin is None:
        raise LookupError(first)
    return list(stamps_of(Path(spec.origin).parent))


def stamps_of(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, bytes and time of change (ns) of the Python files below a folder, in order of
    names; raises LookupError at more than `_MOST_FILES`.
    """
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            count += 1
            if count > _MOST_FILES:
                raise LookupError(folder)
            stat = Path(place, name).stat()
            yield f"{place}/{name}", stat.st_size, stat.st_mtime_ns
