"""The devices of a node: enough of them, free, healthy, with a driver that torch's CUDA runs on."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from framework.doctor.node.findings import GIB, MIB, Check, size_text, warning
from framework.doctor.node.requirements import Requirements
from framework.errors import ConfigError, Problem, counted
from framework.launch.hosts.devices import find_devices, torch_text, unused_gpus

_SECONDS: Final = 10
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
    """Devices against ranks, and what `nvidia-smi` says of them where it is there."""
    ranks = requirements.cluster.devices_per_host
    try:
        found = find_devices(environment)
    except ConfigError as error:
        return Check("devices", "cannot be used as they are asked for", error.problems)
    facts = {"device": found.kind, "slots": ranks}
    if found.kind == "cpu" or not found.count:
        unused = unused_gpus(found, environment)
        if found.kind == "cpu" and requirements.cluster.device in ("cuda", "npu"):
            unused = _too_few(0, ranks, requirements.cluster.device)
        if found.kind == "cpu":
            on = "processors"
        else:
            on = f"{found.kind} devices, which nobody counts"
        stated = (
            f"{'no accelerator, ' if found.kind == 'cpu' else ''}{counted(ranks, 'rank')} on {on}"
        )
        return Check("devices", stated, (unused,) if unused else (), facts)
    if found.kind == "cuda":
        seen = _ask_nvidia_smi("gpu", _PER_GPU, environment)
    else:
        seen = []
    by_index = {row["index"]: row for row in seen}
    # by the ranks, in their order
    taken = by_index if found.chosen is None else map(str, found.chosen)
    used = [by_index[index] for index in taken if index in by_index][:ranks]
    if found.count < ranks:
        problems = [_too_few(found.count, ranks, found.kind)]
    else:
        problems = []
    if used:
        problems += _about(used, _ask_nvidia_smi("compute-apps", _PER_PROCESS, environment))
    names = sorted({row["name"] for row in used})
    stated = f"{ranks} of {found.count} {found.kind}{f': {chr(32).join(names)}' if names else ''}"
    return Check(
        "devices",
        stated,
        problems,
        facts | {"gpus": [row["uuid"] for row in used], "gpu_names": names},
    )


def _ask_nvidia_smi(
    about: str, columns: Sequence[str], environment: Mapping[str, str]
) -> list[Row]:
    """Rows of ``nvidia-smi --query-...``; none where it is missing, fails or takes longer than ten
    seconds.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    command = [program, f"--query-{about}={','.join(columns)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = ([word.strip() for word in row] for row in csv.reader(done.stdout.splitlines()))
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _about(gpus: Sequence[Row], processes: Sequence[Row]) -> Iterator[Problem]:
    own = {os.getpid(), os.getppid()}
    for gpu in gpus:
        label = f"GPU {gpu['index']}"
        others = [
            each
            for each in processes
            if each["gpu_uuid"] == gpu["uuid"] and _number(each["pid"]) not in own
        ]
        used = _number(gpu["memory.used"]) * MIB
        stated = f"{size_text(used)} used"
        if others:
            listed = ", ".join(f"{each['process_name']} (pid {each['pid']})" for each in others[:3])
            fix = "end it, or choose others with CUDA_VISIBLE_DEVICES"
            yield warning(
                "gpu-busy", f"somebody else computes there: {listed}", fix, key=label, value=stated
            )
        elif used > GIB:
            reason = (
                "no process is seen there, it may run in another container or have left it behind"
            )
            yield warning(
                "gpu-memory-used",
                reason,
                "look with nvidia-smi on the host",
                key=label,
                value=stated,
            )
        errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
        if errors or gpu["retired_pages.pending"].lower() == "yes":
            if errors:
                found = f"{errors} uncorrected memory errors"
            else:
                found = "memory pages that wait for their retirement"
            reason = f"it has {found} since the driver was loaded"
            fix = "reset the GPU, or take the host out of service"
            yield warning("gpu-memory-errors", reason, fix, key=label, value=gpu["uuid"])
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
    return Problem(
        "too-few-devices",
        f"{ranks} ranks want a {kind} device each",
        fix,
        key="devices",
        value=count,
    )


def _number(text: str) -> int:
    """0 for what a GPU does not count, such as ``[N/A]``."""
    if text.isdecimal():
        return int(text)
    return 0
