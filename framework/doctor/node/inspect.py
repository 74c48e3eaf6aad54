"""`examine`: everything that can be known of one node without the others, in a second or two."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from framework.doctor.node.compilers import check_ops
from framework.doctor.node.findings import Check, Node
from framework.doctor.node.gpus import check_devices
from framework.doctor.node.machine import (
    check_cores,
    check_locked_memory,
    check_name,
    check_open_files,
    check_shared_memory,
    check_user,
)
from framework.doctor.node.need import Need, check_inputs
from framework.doctor.node.software import check_code, check_versions, environment_facts
from framework.doctor.node.storage import check_home, check_offload, check_run_folder, check_temporary
from framework.errors import Problem
from framework.launch.deepspeed_command import added_environment

_BOOT: Path = Path("/proc/sys/kernel/random/boot_id")


def examine(need: Need, environment: Mapping[str, str], *, name: str = "", counts_replaced: bool = False) -> Node:
    """Look at this machine.

    Args:
        need: what the run asks of it.
        environment: that of the launcher; what it adds for its ranks is added here as well.
        name: what others call this node; left out: its own name for itself.
        counts_replaced: say how much a resume has set aside, which takes a look at every file of it: for a person, not
            for a start.
    """
    started = time.perf_counter()
    ranks = need.cluster.devices_per_host
    of_ranks = {**environment, **added_environment(environment, device=need.cluster.device, num_ranks=ranks)}
    looks: dict[str, Callable[[], Check]] = {
        "versions": lambda: check_versions(need),
        "code": lambda: check_code(need),
        "devices": lambda: check_devices(need, environment),
        "cores": lambda: check_cores(need, environment),
        "shared memory": lambda: check_shared_memory(need),
        "locked memory": check_locked_memory,
        "open files": lambda: check_open_files(need),
        "compiled ops": lambda: check_ops(need, of_ranks),
        "inputs": lambda: check_inputs(need),
        "run folder": lambda: check_run_folder(need, counts_replaced=counts_replaced),
        "offload": lambda: check_offload(need),
        "temporary files": lambda: check_temporary(environment),
        "home and caches": lambda: check_home(need, environment),
        "user": lambda: check_user(environment),
        "host name": lambda: check_name(need, environment),
        "clock": lambda: _clock(environment),
    }
    checks = tuple(_looked(label, look) for label, look in looks.items())
    return Node(name or socket.gethostname(), checks, time.perf_counter() - started)


def _looked(name: str, look: Callable[[], Check]) -> Check:
    """A look that the system does not allow is said, and stops none of the others."""
    try:
        return look()
    except OSError as error:
        return Check(
            name,
            "could not be looked at",
            (
                Problem(
                    kind="not-looked-at",
                    key=name,
                    severity="note",
                    reason=str(error),
                    fix="run doctor where it is allowed",
                ),
            ),
        )


def _clock(environment: Mapping[str, str]) -> Check:
    """The time is compared between nodes; alone it says whether there is a clock at all."""
    now = time.time()
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    facts = {
        "clock": now,
        "boot": boot,
        "pid": os.getpid(),
        "platform": platform.machine(),
        "variables": environment_facts(environment),
    }
    problems: tuple[Problem, ...] = ()
    if now < 1_700_000_000:
        problems = (
            Problem(
                kind="clock-unset",
                key="clock",
                value=time.strftime("%Y-%m-%d", time.gmtime(now)),
                severity="warning",
                reason="it was never set: certificates and file times go wrong",
                fix="start chrony or ntpd",
            ),
        )
    return Check("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)), problems, facts)
