"""The devices of a node: enough of them, free, healthy, with a driver that torch's CUDA runs on."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from framework.doctor.node.findings import GIB, MIB, Check, size_text, warning
from framework.doctor.node.requirements import Requirements
from framework.errors import ConfigError, Problem, counted
from framework.hosts.devices import (
    LocalDevices,
    devices_of_ranks,
    find_devices,
    torch_text,
    unused_gpus,
)
from framework.plan.cluster import Cluster

_SECONDS: Final = 10
_MOST_LISTED: Final = 3  # processes of a GPU in a message
_PER_GPU: Final = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
)
_PER_PROCESS: Final = ("gpu_uuid", "pid", "process_name", "used_memory")
# CUDA major release -> the oldest major release of the driver that runs it (CUDA Toolkit Release
# Notes, table 2).
_OLDEST_DRIVER: Final[Mapping[str, int]] = {"11": 450, "12": 525, "13": 580}

Row = Mapping[str, str]


def check_devices(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Compare devices with ranks, and check the state of GPUs if `nvidia-smi` is there."""
    cluster = requirements.cluster
    ranks = cluster.devices_per_host
    try:
        devices = find_devices(environment)
    except ConfigError as error:
        return Check("devices", "cannot be used as they are asked for", error.problems)
    facts: dict[str, Any] = {"device": devices.kind, "slots": ranks}
    if devices.kind == "cpu":
        outcome = f"no accelerator, {counted(ranks, 'rank')} on processors"
        return Check("devices", outcome, _no_accelerator(cluster, devices, environment), facts)
    if not devices.count:
        outcome = f"{counted(ranks, 'rank')} on {devices.kind} devices, which are not counted"
        return Check("devices", outcome, (), facts)
    return _check_counted(devices, ranks, environment, facts)


def _check_counted(
    devices: LocalDevices, ranks: int, environment: Mapping[str, str], facts: dict[str, Any]
) -> Check:
    """Compare the number of devices with that of ranks, and check the state of GPUs."""
    problems = []
    if devices.count < ranks:
        problems.append(_too_few(devices.count, ranks, devices.kind))
    gpus = _gpus_of_ranks(devices, ranks, environment)
    if gpus:
        problems += _gpu_problems(gpus, _ask_nvidia_smi("compute-apps", _PER_PROCESS, environment))
    names = sorted({row["name"] for row in gpus})
    facts |= {"gpus": [row["uuid"] for row in gpus], "gpu_names": names}
    outcome = f"{ranks} of {devices.count} {devices.kind}"
    if names:
        outcome += f": {' '.join(names)}"
    return Check("devices", outcome, problems, facts)


def _no_accelerator(
    cluster: Cluster, devices: LocalDevices, environment: Mapping[str, str]
) -> list[Problem]:
    """Return the error of a run that is planned for accelerators, and a warning of GPUs that are
    not used.
    """
    problems = []
    if cluster.device in ("cuda", "npu"):
        problems.append(_too_few(0, cluster.devices_per_host, cluster.device))
    unused = unused_gpus(devices, environment)
    if unused is not None:
        problems.append(unused)
    return problems


def _gpus_of_ranks(
    devices: LocalDevices, num_ranks: int, environment: Mapping[str, str]
) -> list[Row]:
    """Return the rows of `nvidia-smi` for the devices of the ranks, in the order of the ranks."""
    if devices.kind != "cuda":
        return []
    by_index = {row["index"]: row for row in _ask_nvidia_smi("gpu", _PER_GPU, environment)}
    rows = []
    for number in devices_of_ranks(devices.chosen, num_ranks):
        row = by_index.get(str(number))
        if row is not None:
            rows.append(row)
    return rows


def _ask_nvidia_smi(
    about: str, columns: Sequence[str], environment: Mapping[str, str]
) -> list[Row]:
    """Return the rows of ``nvidia-smi --query-...``.

    There are none if it is missing, fails or takes longer than ten seconds.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    command = [program, f"--query-{about}={','.join(columns)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows: list[Row] = []
    for values in csv.reader(done.stdout.splitlines()):
        if len(values) == len(columns):
            rows.append(dict(zip(columns, map(str.strip, values), strict=True)))
    return rows


def _gpu_problems(gpus: Sequence[Row], processes: Sequence[Row]) -> Iterator[Problem]:
    """Yield the problems of GPUs; `processes`: those that compute on any GPU of this host."""
    for gpu in gpus:
        yield from _about_use(gpu, processes)
        yield from _about_memory(gpu)
    yield from _about_driver(gpus)


def _about_use(gpu: Row, processes: Sequence[Row]) -> Iterator[Problem]:
    """Warn if a process other than this one and its parent uses the GPU, or if more than 1 GiB is
    in use and no process is listed.
    """
    label = f"GPU {gpu['index']}"
    own = {os.getpid(), os.getppid()}
    there = [process for process in processes if process["gpu_uuid"] == gpu["uuid"]]
    others = [
        f"{process['process_name']} (pid {process['pid']})"
        for process in there
        if _number(process["pid"]) not in own
    ]
    used = _number(gpu["memory.used"]) * MIB
    value = f"{size_text(used)} used"
    if others:
        reason = f"in use by {_listed(others)}"
        fix = "end it, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield warning("gpu-busy", reason, fix, key=label, value=value)
    elif used > GIB and not there:
        reason = (
            "no process is listed: one in another container may hold it, or one that ended has "
            "left it behind"
        )
        fix = "look with nvidia-smi on the host"
        yield warning("gpu-memory-used", reason, fix, key=label, value=value)


def _listed(processes: Sequence[str]) -> str:
    """Join the first processes, and count the others."""
    listed = ", ".join(processes[:_MOST_LISTED])
    if len(processes) > _MOST_LISTED:
        listed += f" and {len(processes) - _MOST_LISTED} more"
    return listed


def _about_memory(gpu: Row) -> Iterator[Problem]:
    """Warn of a GPU that has counted memory errors."""
    errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        found = f"{errors} uncorrected memory errors"
    elif gpu["retired_pages.pending"].lower() == "yes":
        found = "memory pages that wait for their retirement"
    else:
        return
    reason = f"it has {found} since the driver was loaded"
    fix = "reset the GPU, or take the host out of service"
    yield warning("gpu-memory-errors", reason, fix, key=f"GPU {gpu['index']}", value=gpu["uuid"])


def _about_driver(gpus: Sequence[Row]) -> Iterator[Problem]:
    """Yield an error for each release of the driver that torch's CUDA does not run on."""
    cuda = torch_text("cuda")
    oldest = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    for driver in sorted({row["driver_version"] for row in gpus}):
        if oldest and 0 < _number(driver.partition(".")[0]) < oldest:
            reason = f"torch is built for CUDA {cuda}, which needs release {oldest} or later"
            fix = "update the driver, or install torch for an older CUDA"
            yield Problem("driver-too-old", reason, fix, key="driver", value=driver)


def _too_few(count: int, ranks: int, kind: str) -> Problem:
    if count:
        fix = f"at most {count} ranks on this host"
    else:
        fix = "DS_ACCELERATOR=cpu to try it on processors"
    reason = f"{ranks} ranks want a {kind} device each"
    return Problem("too-few-devices", reason, fix, key="devices", value=count)


def _number(text: str) -> int:
    """Read a number; texts such as ``[N/A]``, for values that a GPU does not count, are 0."""
    if text.isdecimal():
        return int(text)
    return 0
