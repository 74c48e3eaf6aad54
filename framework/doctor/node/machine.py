"""Limits of one node: shared memory, open files, cores, its own name, its home."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pwd
import resource
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from framework.doctor.node.findings import MIB, Check, size_text
from framework.doctor.node.need import Need
from framework.errors import Problem
from framework.launch.hosts.devices import usable_cores

SHARED_MEMORY: Final = Path("/dev/shm")
RDMA_DEVICES: Final = Path("/dev/infiniband")
_CONTAINER_DEFAULT_BYTES: Final = 64 * MIB
# Below it DeepSpeed's ds_report warns.
_COMFORTABLE_BYTES: Final = 512 * MIB
_LOCKED_BYTES: Final = 64 * MIB
_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def check_shared_memory(need: Need, folder: Path = SHARED_MEMORY) -> Check:
    """/dev/shm against what ranks of one host and data workers pass through it."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return Check(
            "shared memory",
            f"{folder}: {error.strerror}",
            (
                Problem(
                    kind="shm-missing",
                    key=str(folder),
                    reason="ranks of one host cannot share memory",
                    fix="mount a tmpfs there",
                ),
            ),
        )
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    wanted, reason = _wanted_shared_memory(need)
    problems = []
    if free < wanted:
        default = ", a container's default," if total == _CONTAINER_DEFAULT_BYTES else ""
        problems.append(
            Problem(
                kind="shm-small",
                key=str(folder),
                value=f"{size_text(free)} free of {size_text(total)}",
                severity="warning",
                reason=f"that{default} is less than {size_text(wanted)}, and {reason}: SIGBUS or `No space left on "
                "device`",
                fix="docker run --shm-size=1g; in a pod an emptyDir of medium Memory mounted there",
            )
        )
    return Check("shared memory", f"{size_text(free)} free of {size_text(total)}", tuple(problems))


def _wanted_shared_memory(need: Need) -> tuple[int, str]:
    """Bytes, and who wants them. What DeepSpeed's own op maps for ranks on processors is not touched by training."""
    if need.num_workers:
        return _COMFORTABLE_BYTES, f"{need.num_workers} data workers of each rank pass batches through it"
    if need.cluster.device == "cuda" and need.cluster.devices_per_host > 1:
        return _COMFORTABLE_BYTES, "NCCL passes data between GPUs of a host through it"
    return 0, ""


def check_locked_memory(folder: Path = RDMA_DEVICES) -> Check:
    """Locks 64 MiB for real where there are RDMA devices: a capability in the manifest says little (it may not be
    effective).
    """
    if not any(folder.glob("uverbs*")):
        return Check("locked memory", "no RDMA device here, not needed")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else size_text(limit)
    if _can_lock(_LOCKED_BYTES):
        return Check("locked memory", f"{size_text(_LOCKED_BYTES)} locked, limit {shown}")
    problem = Problem(
        kind="memlock",
        key="ulimit -l",
        value=shown,
        severity="warning",
        reason=f"{size_text(_LOCKED_BYTES)} cannot be locked, so RDMA fails and NCCL takes TCP in silence",
        fix="ulimit -l unlimited; in a container --ulimit memlock=-1, as root or with an effective IPC_LOCK",
    )
    return Check("locked memory", f"cannot be locked, limit {shown}", (problem,))


def _can_lock(num_bytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.closing(mmap.mmap(-1, num_bytes)) as memory:
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(start))
        try:
            return bool(libc.mlock(address, ctypes.c_size_t(num_bytes)) == 0)
        finally:
            libc.munlock(address, ctypes.c_size_t(num_bytes))
            del start  # a mapping with a pointer into it cannot be closed


def check_open_files(need: Need) -> Check:
    """``ulimit -n``, by a rule of thumb: libraries and logs, sockets to every rank, a few for each batch of a data
    worker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 512 + 32 * need.cluster.world_size + 32 * need.num_workers * need.prefetch_batches
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Check("open files", f"up to {shown}")
    fix = (
        f"ulimit -n {wanted}"
        if hard == resource.RLIM_INFINITY or hard >= wanted
        else "raise LimitNOFILE, or limits.conf"
    )
    problem = Problem(
        kind="nofile-low",
        key="ulimit -n",
        value=soft,
        severity="warning" if soft >= 256 else "error",
        reason=f"{need.cluster.world_size} ranks may need about {wanted}",
        fix=fix,
    )
    return Check("open files", f"up to {shown}", (problem,))


def check_cores(need: Need, environment: Mapping[str, str]) -> Check:
    """Threads of all ranks against the cores that this process may use."""
    ranks, cores = need.cluster.devices_per_host, min(usable_cores(), _quota())
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    stated = f"{cores} for {ranks} rank{'s' if ranks > 1 else ''}"
    threads = int(text) if text.isdecimal() else 0
    if not threads:
        return Check("cores", stated)
    stated = f"{stated} x OMP_NUM_THREADS={threads}"
    if need.cluster.device == "cpu" and ranks * threads > cores and threads > 1:
        return Check(
            "cores",
            stated,
            (
                Problem(
                    kind="too-many-threads",
                    key="OMP_NUM_THREADS",
                    value=threads,
                    severity="warning",
                    reason=f"{ranks} ranks would run {ranks * threads} threads on {cores} cores, and wait for each "
                    "other",
                    fix=f"OMP_NUM_THREADS={max(1, cores // ranks)}, or leave it out",
                ),
            ),
        )
    return Check("cores", stated)


def _quota() -> int:
    """Whole cores that the container may use, as cgroups version 2 limit it; many where there is no limit."""
    try:
        used, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, int(used) // int(period))
    except (OSError, ValueError):  # no limit reads "max 100000"
        return 1 << 20


def check_name(need: Need, environment: Mapping[str, str]) -> Check:
    """Check whether this host's own name leads other hosts to it: gloo tells them the address that it stands for."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)})
    except OSError:
        addresses = []
    problems: list[Problem] = []
    multiple = need.cluster.num_hosts > 1
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    if multiple and chosen and chosen not in (known := [each for _, each in socket.if_nameindex()]):
        problems.append(
            Problem(
                kind="interface-unknown",
                key="GLOO_SOCKET_IFNAME",
                value=chosen,
                reason="gloo wants the name of one interface of this host, without ^ or commas",
                fix=f"one of {', '.join(known)}",
            )
        )
    if (
        multiple
        and not chosen
        and (not addresses or any(ip_address(each.partition("%")[0]).is_loopback for each in addresses))
    ):
        leads = f"leads to {', '.join(addresses)}" if addresses else "leads nowhere"
        problems.append(
            Problem(
                kind="hostname-loopback",
                key="hostname",
                value=name,
                severity="warning",
                reason=f"it {leads}; started with `deepspeed` or `torchrun` by hand, gloo sends other hosts there and "
                "hangs",
                fix="give it the host's own address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
            )
        )
    stated = f"{name} is {', '.join(addresses) or 'not known'}"
    return Check("host name", stated, tuple(problems), {"hostname": name, "addresses": addresses})


def check_user(environment: Mapping[str, str]) -> Check:
    """Check the user who trains: one without a name, as random ids in containers are, breaks torch's compiler."""
    uid = os.getuid()
    try:
        return Check("user", pwd.getpwuid(uid).pw_name)
    except KeyError:
        pass
    named = environment.get("USER") or environment.get("LOGNAME")
    problem = Problem(
        kind="user-unknown",
        key="uid",
        value=uid,
        severity="warning",
        reason="the system has no name for this user, and torch.compile and Triton ask for it",
        fix="set USER and HOME",
    )
    return Check("user", f"{named or 'without a name'} ({uid})", () if named else (problem,))
