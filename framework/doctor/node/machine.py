"""`examine`: everything that can be known of one node without the others, in a second or two."""

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
from collections.abc import Iterator, Mapping, Sequence
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
from framework.errors import ConfigError, Problem, Severity, counted
from framework.hosts.cores import bind_ranks
from framework.hosts.devices import LocalDevices, find_devices, usable_cores
from framework.hosts.rank_environment import added_environment
from framework.system.limits import host_memory_bytes

SHARED_MEMORY: Final = Path("/dev/shm")
RDMA_DEVICES: Final = Path("/dev/infiniband")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_CONTAINER_DEFAULT_BYTES: Final = 64 * MIB
# DeepSpeed's ds_report warns of less.
_COMFORTABLE_BYTES: Final = 512 * MIB
_LOCKED_BYTES: Final = 64 * MIB
_FIRST_TIME: Final = 1_700_000_000  # November 2023: a clock that was set is later


def examine(
    requirements: Requirements,
    environment: Mapping[str, str],
    *,
    name: str = "",
    counts_replaced: bool = False,
) -> Node:
    """Examine this machine.

    Args:
        requirements: of a run.
        environment: that of the launcher; the variables that the launcher adds for its ranks are
            added here as well.
        name: by which the other nodes call this one; empty: its own host name.
        counts_replaced: whether to look at every file that a resume has set aside, which is for a
            user, and not for a start.
    """
    started = time.perf_counter()
    cluster = requirements.cluster
    of_ranks = dict(environment)
    of_ranks |= added_environment(
        environment, device=cluster.device, num_ranks=cluster.devices_per_host
    )
    # A function for each check, with its arguments.
    looks: dict[str, tuple[Any, ...]] = {
        "versions": (check_versions, requirements),
        "code": (check_code, requirements),
        "devices": (check_devices, requirements, environment),
        "cores": (check_cores, requirements, environment),
        "shared memory": (check_shared_memory, requirements),
        "host memory": (check_host_memory, requirements),
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
        except OSError as error:  # not allowed here; the other checks go on
            fix = "run doctor where it is allowed"
            problem = Problem("not-looked-at", str(error), fix, label, severity="note")
            checks.append(Check(label, "could not be looked at", [problem]))
    return Node(name or socket.gethostname(), checks, time.perf_counter() - started)


def _user_of_shared_memory(requirements: Requirements) -> str:
    """Describe what passes data through /dev/shm; empty if nothing does. Training does not touch
    the memory that DeepSpeed's own op maps there for ranks on processors.
    """
    if requirements.num_workers:
        return f"{requirements.num_workers} data workers of each rank pass batches through it"
    if requirements.cluster.device == "cuda" and requirements.cluster.devices_per_host > 1:
        return "NCCL passes data between GPUs of a host through it"
    return ""


def check_shared_memory(requirements: Requirements, folder: Path = SHARED_MEMORY) -> Check:
    """Check /dev/shm, through which ranks of one host and data workers pass data."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        reason = "ranks of one host cannot share memory"
        problem = Problem("shm-missing", reason, "mount a tmpfs there", key=str(folder))
        return Check("shared memory", f"{folder}: {error.strerror}", [problem])
    total = status.f_blocks * status.f_frsize
    free = status.f_bavail * status.f_frsize
    outcome = f"{size_text(free)} free of {size_text(total)}"
    problems = []
    wanted_by = _user_of_shared_memory(requirements)
    if wanted_by and free < _COMFORTABLE_BYTES:
        if total == _CONTAINER_DEFAULT_BYTES:
            default = ", a container's default,"
        else:
            default = ""
        less = f"that{default} is less than {size_text(_COMFORTABLE_BYTES)}"
        reason = f"{less}, and {wanted_by}: SIGBUS or `No space left on device`"
        fix = "docker run --shm-size=1g; in a pod an emptyDir of medium Memory mounted there"
        problems.append(warning("shm-small", reason, fix, key=str(folder), value=outcome))
    return Check("shared memory", outcome, problems)


def check_host_memory(requirements: Requirements, total: int | None = None) -> Check:
    """Hold the memory of this machine, `total` bytes, against what ranks take of it by estimate."""
    if total is None:
        total = host_memory_bytes()
    taken = requirements.host_bytes
    outcome = size_text(total)
    if not taken:
        return Check("host memory", outcome)
    outcome += f", {size_text(taken)} of it for what its ranks offload, by estimate"
    if taken <= total:
        return Check("host memory", outcome)
    reason = f"its ranks take {size_text(taken)} of it for what they offload, by estimate"
    fix = "use more hosts, or fewer ranks on each; `plan` shows the parts"
    problem = warning("host-memory-small", reason, fix, key="host memory", value=size_text(total))
    return Check("host memory", outcome, [problem])


def check_locked_memory(folder: Path = RDMA_DEVICES) -> Check:
    """Lock 64 MiB of memory, if there are RDMA devices.

    A capability in the manifest of a pod may not be effective, so that the limit is not enough.
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
        address = ctypes.c_void_p(ctypes.addressof(start))
        size = ctypes.c_size_t(num_bytes)
        is_locked = bool(libc.mlock(address, size) == 0)
        libc.munlock(address, size)
        del start  # a mapping with a pointer into it cannot be closed
    return is_locked


def check_open_files(requirements: Requirements) -> Check:
    """Check ``ulimit -n`` by a rule of thumb.

    Files are open for libraries and logs, for sockets to every rank, and for batches of workers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_ranks = requirements.cluster.world_size
    num_batches = requirements.num_workers * requirements.prefetch_batches
    wanted = 512 + 32 * num_ranks + 32 * num_batches
    if soft == resource.RLIM_INFINITY:
        return Check("open files", "up to unlimited")
    if soft >= wanted:
        return Check("open files", f"up to {soft}")
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        fix = f"ulimit -n {wanted}"
    else:
        fix = "raise LimitNOFILE, or limits.conf"
    reason = f"{num_ranks} ranks may need about {wanted}"
    severity: Severity = "warning" if soft >= 256 else "error"
    problem = Problem("nofile-low", reason, fix, key="ulimit -n", value=soft, severity=severity)
    return Check("open files", f"up to {soft}", [problem])


def check_cores(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Compare the threads of all ranks with the cores that this process may use, and show the cores
    to which `launch` binds each rank.
    """
    ranks = requirements.cluster.devices_per_host
    cores = min(usable_cores(), _quota())
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if text.isdecimal():
        threads = int(text)
    else:
        threads = 0
    outcome = f"{cores} for {counted(ranks, 'rank')}"
    if threads:
        outcome += f" x OMP_NUM_THREADS={threads}"
    outcome += f"; {_binding(requirements, environment)}"
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
    return Check("cores", outcome, problems)


def _binding(requirements: Requirements, environment: Mapping[str, str]) -> str:
    """Describe the cores to which `launch` binds the ranks of this host by itself."""
    cluster = requirements.cluster
    devices = LocalDevices("cpu", 0)
    if cluster.device == "cuda":
        with contextlib.suppress(ConfigError):  # the check of devices reports it
            devices = find_devices(environment)
    return bind_ranks("auto", devices, cluster.devices_per_host).line


def _quota() -> int:
    """Return the whole cores that cgroups version 2 leave to the container; many if unlimited."""
    try:
        used, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, int(used) // int(period))
    except (OSError, ValueError):  # no limit reads "max 100000"
        return 1 << 20


def check_name(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Check whether this host's own name leads other hosts to it.

    gloo sends them the address to which the name resolves.
    """
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        entries = []
    addresses = sorted({str(entry[4][0]) for entry in entries})
    problems: list[Problem] = []
    if requirements.cluster.num_hosts > 1:
        interface = environment.get("GLOO_SOCKET_IFNAME", "")
        if interface:
            problems += _about_interface(interface)
        else:
            problems += _about_addresses(name, addresses)
    outcome = f"{name} is {', '.join(addresses) or 'not known'}"
    return Check("host name", outcome, problems, {"hostname": name, "addresses": addresses})


def _about_interface(interface: str) -> Iterator[Problem]:
    """Yield an error if this host has no interface of this name."""
    known = dict(socket.if_nameindex()).values()
    if interface not in known:
        reason = "gloo wants the name of one interface of this host, without ^ or commas"
        fix = f"one of {', '.join(known)}"
        yield Problem("interface-unknown", reason, fix, key="GLOO_SOCKET_IFNAME", value=interface)


def _about_addresses(name: str, addresses: Sequence[str]) -> Iterator[Problem]:
    """Warn if gloo would send other hosts a wrong address of this one."""
    is_loopback = any(ip_address(text.partition("%")[0]).is_loopback for text in addresses)
    if addresses and not is_loopback:
        return
    if addresses:
        leads = f"leads to {', '.join(addresses)}"
    else:
        leads = "leads nowhere"
    by_hand = (
        "started with `deepspeed` or `torchrun` by hand, gloo sends other hosts there and hangs"
    )
    reason = f"it {leads}; {by_hand}"
    fix = "give it the host's own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
    yield warning("hostname-loopback", reason, fix, key="hostname", value=name)


def check_user(environment: Mapping[str, str]) -> Check:
    """Check the user who trains: torch's compiler does not work for a user without a name.

    Random user ids in containers have none.
    """
    uid = os.getuid()
    try:
        return Check("user", pwd.getpwuid(uid).pw_name)
    except KeyError:
        name = environment.get("USER") or environment.get("LOGNAME")
    if name:
        return Check("user", f"{name} ({uid})")
    reason = "the system has no name for this user, and torch.compile and Triton ask for it"
    problem = warning("user-unknown", reason, "set USER and HOME", key="uid", value=uid)
    return Check("user", f"without a name ({uid})", [problem])


def _check_clock(environment: Mapping[str, str]) -> Check:
    """Check whether the clock was ever set, and add the time to the facts for a comparison."""
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
    outcome = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return Check("clock", outcome, problems, facts | {"variables": environment_facts(environment)})
