"""`examine`: everything that can be known of one node without the others, in a second or two; and
its limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import pwd
import resource
import socket
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from framework.doctor.node.findings import MIB, Check, Node, size_text, warning
from framework.doctor.node.gpus import check_devices
from framework.doctor.node.requirements import Requirements, check_inputs
from framework.doctor.node.software import check_code, check_ops, check_versions, environment_facts
from framework.doctor.node.storage import (
    check_home,
    check_offload,
    check_run_folder,
    check_temporary,
)
from framework.errors import Problem, counted
from framework.launch.deepspeed_command import added_environment
from framework.launch.hosts.devices import usable_cores

SHARED_MEMORY: Final = Path("/dev/shm")
RDMA_DEVICES: Final = Path("/dev/infiniband")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_CONTAINER_DEFAULT_BYTES: Final = 64 * MIB
# Below it DeepSpeed's ds_report warns.
_COMFORTABLE_BYTES: Final = 512 * MIB
_LOCKED_BYTES: Final = 64 * MIB
_FIRST_TIME: Final = 1_700_000_000


def examine(
    requirements: Requirements,
    environment: Mapping[str, str],
    *,
    name: str = "",
    counts_replaced: bool = False,
) -> Node:
    """Look at this machine.

    Args:
        environment: that of the launcher; what it adds for its ranks is added here as well.
        name: what others call this node, if not what it calls itself.
        counts_replaced: look at every file that a resume has set aside: for a person, not for a
            start.
    """
    started = time.perf_counter()
    ranks = requirements.cluster.devices_per_host
    of_ranks = {
        **environment,
        **added_environment(environment, device=requirements.cluster.device, num_ranks=ranks),
    }
    looks: dict[str, tuple[Any, ...]] = {
        "versions": (check_versions, requirements),
        "code": (check_code, requirements),
        "devices": (check_devices, requirements, environment),
        "cores": (check_cores, requirements, environment),
        "shared memory": (check_shared_memory, requirements),
        "locked memory": (check_locked_memory,),
        "open files": (check_open_files, requirements),
        "compiled ops": (check_ops, requirements, of_ranks),
        "inputs": (check_inputs, requirements),
        "run folder": (check_run_folder, requirements, counts_replaced),
        "offload": (check_offload, requirements),
        "temporary files": (check_temporary, environment),
        "home and caches": (check_home, requirements, environment),
        "user": (check_user, environment),
        "host name": (check_name, requirements, environment),
        "clock": (_check_clock, environment),
    }
    checks: list[Check] = []
    for label, (look, *facts) in looks.items():
        try:
            checks.append(look(*facts))
        except OSError as error:  # not allowed here; it stops none of the others
            problem = Problem(
                "not-looked-at",
                str(error),
                "run doctor where it is allowed",
                label,
                severity="note",
            )
            checks.append(Check(label, "could not be looked at", [problem]))
    return Node(name or socket.gethostname(), checks, time.perf_counter() - started)


def check_shared_memory(requirements: Requirements, folder: Path = SHARED_MEMORY) -> Check:
    """/dev/shm against what ranks of one host and data workers pass through it."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        reason = "ranks of one host cannot share memory"
        problem = Problem("shm-missing", reason, "mount a tmpfs there", key=str(folder))
        return Check("shared memory", f"{folder}: {error.strerror}", [problem])
    total = found.f_blocks * found.f_frsize
    free = found.f_bavail * found.f_frsize
    stated = f"{size_text(free)} free of {size_text(total)}"
    problems = []
    # What DeepSpeed's own op maps for ranks on processors is not touched by training.
    wanted_by = ""
    if requirements.num_workers:
        wanted_by = f"{requirements.num_workers} data workers of each rank pass batches through it"
    elif requirements.cluster.device == "cuda" and requirements.cluster.devices_per_host > 1:
        wanted_by = "NCCL passes data between GPUs of a host through it"
    if wanted_by and free < _COMFORTABLE_BYTES:
        if total == _CONTAINER_DEFAULT_BYTES:
            default = ", a container's default,"
        else:
            default = ""
        less = f"that{default} is less than {size_text(_COMFORTABLE_BYTES)}"
        reason = f"{less}, and {wanted_by}: SIGBUS or `No space left on device`"
        fix = "docker run --shm-size=1g; in a pod an emptyDir of medium Memory mounted there"
        problems.append(warning("shm-small", reason, fix, key=str(folder), value=stated))
    return Check("shared memory", stated, problems)


def check_locked_memory(folder: Path = RDMA_DEVICES) -> Check:
    """Lock 64 MiB for real where there are RDMA devices: a capability in the manifest may not be
    effective.
    """
    if not any(folder.glob("uverbs*")):
        return Check("locked memory", "no RDMA device here, not needed")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        shown = "unlimited"
    else:
        shown = size_text(limit)
    if _can_lock(_LOCKED_BYTES):
        return Check("locked memory", f"{size_text(_LOCKED_BYTES)} locked, limit {shown}")
    reason = (
        f"{size_text(_LOCKED_BYTES)} cannot be locked, so RDMA fails and NCCL takes TCP in silence"
    )
    fix = (
        "ulimit -l unlimited; in a container --ulimit memlock=-1, as root or with an effective "
        "IPC_LOCK"
    )
    problem = warning("memlock", reason, fix, key="ulimit -l", value=shown)
    return Check("locked memory", f"cannot be locked, limit {shown}", [problem])


def _can_lock(num_bytes: int) -> bool:
    libc = ctypes.CDLL(None)
    with contextlib.closing(mmap.mmap(-1, num_bytes)) as memory:
        start = ctypes.c_char.from_buffer(memory)
        place = (ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(num_bytes))
        is_locked = bool(libc.mlock(*place) == 0)
        libc.munlock(*place)
        del start  # a mapping with a pointer into it cannot be closed
    return is_locked


def check_open_files(requirements: Requirements) -> Check:
    """Check ``ulimit -n`` by a rule of thumb: libraries and logs, sockets to every rank, a few for
    a worker's batch.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        512
        + 32 * requirements.cluster.world_size
        + 32 * requirements.num_workers * requirements.prefetch_batches
    )
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Check(
            "open files", f"up to {'unlimited' if soft == resource.RLIM_INFINITY else soft}"
        )
    may_raise = hard == resource.RLIM_INFINITY or hard >= wanted
    if may_raise:
        fix = f"ulimit -n {wanted}"
    else:
        fix = "raise LimitNOFILE, or limits.conf"
    reason = f"{requirements.cluster.world_size} ranks may need about {wanted}"
    kind = warning if soft >= 256 else Problem
    return Check(
        "open files",
        f"up to {soft}",
        [kind("nofile-low", reason, fix, key="ulimit -n", value=soft)],
    )


def check_cores(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Threads of all ranks against the cores that this process may use."""
    ranks = requirements.cluster.devices_per_host
    cores = min(usable_cores(), _quota())
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if text.isdecimal():
        threads = int(text)
    else:
        threads = 0
    stated = (
        f"{cores} for {counted(ranks, 'rank')}{f' x OMP_NUM_THREADS={threads}' if threads else ''}"
    )
    problems = []
    if requirements.cluster.device == "cpu" and ranks * threads > cores and threads > 1:
        reason = (
            f"{ranks} ranks would run {ranks * threads} threads on {cores} cores, and wait "
            "for each other"
        )
        fix = f"OMP_NUM_THREADS={max(1, cores // ranks)}, or leave it out"
        problems.append(
            warning("too-many-threads", reason, fix, key="OMP_NUM_THREADS", value=threads)
        )
    return Check("cores", stated, problems)


def _quota() -> int:
    """Whole cores that the container may use, as cgroups version 2 limit it; many where there is no
    limit.
    """
    try:
        used, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, int(used) // int(period))
    except (OSError, ValueError):  # no limit reads "max 100000"
        return 1 << 20


def check_name(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Check whether this host's own name leads other hosts to it: gloo tells them the address that
    it stands for.
    """
    name = socket.gethostname()
    try:
        addresses = sorted(
            {str(each[4][0]) for each in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)}
        )
    except OSError:
        addresses = []
    problems: list[Problem] = []
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    leads_away = addresses and not any(
        ip_address(each.partition("%")[0]).is_loopback for each in addresses
    )
    known = [each for _, each in socket.if_nameindex()]
    if requirements.cluster.num_hosts > 1 and chosen and chosen not in known:
        reason = "gloo wants the name of one interface of this host, without ^ or commas"
        fix = f"one of {', '.join(known)}"
        problems.append(
            Problem("interface-unknown", reason, fix, key="GLOO_SOCKET_IFNAME", value=chosen)
        )
    elif requirements.cluster.num_hosts > 1 and not chosen and not leads_away:
        if addresses:
            leads = f"leads to {', '.join(addresses)}"
        else:
            leads = "leads nowhere"
        by_hand = (
            "started with `deepspeed` or `torchrun` by hand, gloo sends other hosts there and hangs"
        )
        fix = "give it the host's own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        problems.append(
            warning("hostname-loopback", f"it {leads}; {by_hand}", fix, key="hostname", value=name)
        )
    stated = f"{name} is {', '.join(addresses) or 'not known'}"
    return Check("host name", stated, problems, {"hostname": name, "addresses": addresses})


def check_user(environment: Mapping[str, str]) -> Check:
    """Check the user who trains: one without a name, as random ids in containers are, breaks
    torch's compiler.
    """
    uid = os.getuid()
    try:
        return Check("user", pwd.getpwuid(uid).pw_name)
    except KeyError:
        named = environment.get("USER") or environment.get("LOGNAME")
    reason = "the system has no name for this user, and torch.compile and Triton ask for it"
    problem = warning("user-unknown", reason, "set USER and HOME", key="uid", value=uid)
    return Check("user", f"{named or 'without a name'} ({uid})", [] if named else [problem])


def _check_clock(environment: Mapping[str, str]) -> Check:
    """The time is compared between nodes; alone it says whether there is a clock at all."""
    now = time.time()
    boot = ""
    problems = []
    with contextlib.suppress(OSError):
        boot = _BOOT.read_text(encoding="ascii").strip()
    facts = {"clock": now, "boot": boot, "pid": os.getpid(), "platform": platform.machine()}
    if now < _FIRST_TIME:
        reason = "it was never set: certificates and file times go wrong"
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        problems.append(
            warning("clock-unset", reason, "start chrony or ntpd", key="clock", value=day)
        )
    stated = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return Check("clock", stated, problems, facts | {"variables": environment_facts(environment)})
