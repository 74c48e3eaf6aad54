"""Cores of the ranks on this host: each rank gets its own, near its device, and memory with them.

A process that stays on one NUMA node gets its memory there, because Linux places a page where it is
first written. So the affinity is all that is set: no memory policy, and no `numactl`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Final

from framework.hosts.devices import LocalDevices, devices_of_ranks
from framework.system.limits import control_groups

BINDING_CHOICES: Final = ("auto", "on", "off")
_PROBE_TIMEOUT_SECONDS: Final = 20
_ROOT: Final = Path("/")


@dataclass(frozen=True)
class HostCores:
    """Cores of a host that this process may use.

    Attributes:
        nodes: cores of each NUMA node by its number; each core is a tuple of the processors (the
            kernel's numbers) that share it. Nodes without a usable core are left out.
        is_narrowed: this process has fewer processors than its container, or its host: `numactl`,
            `taskset` or a scheduler has bound it.
    """

    nodes: Mapping[int, Sequence[tuple[int, ...]]]
    is_narrowed: bool = False

    @property
    def num_processors(self) -> int:
        """Number of processors in all nodes."""
        return len(_processors(self.nodes.values()))


@dataclass(frozen=True)
class Binding:
    """Cores of the ranks on this host.

    Attributes:
        processors: of each rank, by its local number; empty: ranks are not bound.
        line: for the log: what each rank has, or why ranks are not bound.
    """

    processors: Sequence[frozenset[int]] = ()
    line: str = field(default="", compare=False)

    def threads(self) -> int | None:
        """Return the number of threads for every rank, by the rank with the fewest processors;
        None if ranks are not bound. The others would wait for that rank in every step.
        """
        return min(map(len, self.processors), default=None)


NOT_BOUND: Final = Binding()


def bind_ranks(
    choice: str,
    devices: LocalDevices,
    num_ranks: int,
    *,
    system: Path = _ROOT,
    usable: frozenset[int] | None = None,
) -> Binding:
    """Divide the usable cores of this host among its ranks, or return why that is not done.

    Args:
        choice: one of `BINDING_CHOICES`: ``auto`` divides where the host has several NUMA nodes or
            several accelerators, and never what was bound before.
        devices: all of this host; `devices_of_ranks` has the ones that ranks use.
        num_ranks: on this host.
        system: folder that holds ``sys`` and ``proc``; the root but for tests.
        usable: processors that this process may use; None: by its affinity.
    """
    if choice == "off":
        return Binding(line="ranks are not bound (--bind_cores off)")
    if not hasattr(os, "sched_setaffinity"):
        return Binding(line="ranks are not bound: this system has no affinity")
    host = read_cores(system=system, usable=usable)
    reason = _reason_of_few_cores(host, num_ranks)
    if not reason and choice == "auto":
        reason = _reason_against(host, devices, num_ranks)
    if reason:
        return Binding(line=f"ranks are not bound: {reason}")
    near: Sequence[int | None] = tuple(repeat(None, num_ranks))  # not known
    if devices.kind != "cpu" and len(host.nodes) > 1:
        nodes = device_nodes(devices, num_ranks, system=system)
        reason = _reason_against_nodes(host, nodes)
        if reason and choice == "auto":
            return Binding(line=f"ranks are not bound: {reason}")
        if not reason:
            near = nodes
    processors = divide(host, near)
    return Binding(processors, _described(host, processors))


def _reason_of_few_cores(host: HostCores, num_ranks: int) -> str:
    """Return why ranks cannot be bound to cores of their own; empty: they can."""
    num_cores = sum(map(len, host.nodes.values()))
    if num_cores < num_ranks:
        return f"{num_cores} cores for {num_ranks} ranks"
    return ""


def _reason_against(host: HostCores, devices: LocalDevices, num_ranks: int) -> str:
    """Return why ``auto`` leaves the ranks of this host as they are; empty: it binds them."""
    if num_ranks == 1:
        return "one rank has all cores"
    if host.is_narrowed:
        return (
            f"{_ranges(_processors(host.nodes.values()))} is what this process was bound to before"
        )
    if len(host.nodes) < 2 and devices.count < 2:
        return "one NUMA node"
    return ""


def _reason_against_nodes(host: HostCores, near: Sequence[int | None]) -> str:
    """Return why ranks cannot be placed by the NUMA nodes of their devices; empty: they can."""
    if any(node is None or node not in host.nodes for node in near):
        return "the NUMA node of a device is not known, or has no usable core"
    without = sorted(set(host.nodes) - set(near))
    if without:
        return f"cores of NUMA node {without[0]}, which has no device of a rank, would be idle"
    return ""


def read_cores(*, system: Path = _ROOT, usable: frozenset[int] | None = None) -> HostCores:
    """Read the cores that this process may use, by NUMA node.

    Args:
        system: folder that holds ``sys`` and ``proc``.
        usable: processors of this process; None: by its affinity.
    """
    if usable is None:
        usable = frozenset(os.sched_getaffinity(0))
    nodes: dict[int, list[tuple[int, ...]]] = {}
    for number, processors in _nodes_of(system):
        cores: dict[int, tuple[int, ...]] = {}  # by the first processor
        for processor in sorted(processors & usable):
            core = tuple(sorted(_core_of(processor, system) & usable))
            cores[core[0]] = core
        if cores:
            nodes[number] = list(cores.values())
    in_nodes = _processors(nodes.values())
    if in_nodes != usable:  # no list of nodes, or not of all processors
        nodes = {0: list(map(_alone, sorted(usable)))}
    return HostCores(nodes, is_narrowed=usable < _of_container(system, default=usable))


def _alone(processor: int) -> tuple[int, ...]:
    """Return the core of a processor that shares it with no other."""
    return (processor,)


def _nodes_of(system: Path) -> list[tuple[int, frozenset[int]]]:
    """Return the number and the processors of each NUMA node, by number."""
    nodes = []
    for folder in (system / "sys/devices/system/node").glob("node*"):
        number = folder.name.removeprefix("node")
        processors = _read_list(folder / "cpulist")
        if number.isdecimal() and processors is not None:
            nodes.append((int(number), processors))
    return sorted(nodes)


def _core_of(processor: int, system: Path) -> frozenset[int]:
    """Return the processors that share a core with this one, and itself."""
    folder = system / f"sys/devices/system/cpu/cpu{processor}/topology"
    return (_read_list(folder / "thread_siblings_list") or frozenset()) | {processor}


def _of_container(system: Path, *, default: frozenset[int]) -> frozenset[int]:
    """Return the processors of this process's control group, or else of the host."""
    for path in _cpuset_files(system):
        processors = _read_list(path)
        if processors:
            return processors
    return _read_list(system / "sys/devices/system/cpu/online") or default


def _cpuset_files(system: Path) -> Iterator[Path]:
    """Yield files that may list the processors of this process's control group.

    Inside a container the group is mounted as the root, and its name is that outside.
    """
    for root, group, is_unified in control_groups("cpuset", system=system):
        name = "cpuset.effective_cpus"
        if is_unified:
            name = "cpuset.cpus.effective"
        yield root / group / name
        yield root / name


def device_nodes(
    devices: LocalDevices, num_ranks: int, *, system: Path = _ROOT
) -> list[int | None]:
    """Return the NUMA node of each rank's NVIDIA GPU; None where it is not known."""
    addresses = _addresses()
    nodes: list[int | None] = []
    for number in devices_of_ranks(devices.chosen, num_ranks):
        nodes.append(_node_of_device(addresses.get(number, ""), system))
    return nodes


def _addresses() -> dict[int, str]:
    """Return the PCI address of each NVIDIA GPU by its number, as the kernel writes it; none if the
    driver's program does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=index,pci.bus_id", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    addresses = {}
    # The program writes a domain of eight digits, the kernel one of four.
    pattern = r"^(\d+), *[0-9A-Fa-f]{4}([0-9A-Fa-f]{4}:\S+)$"
    for number, address in re.findall(pattern, listed.stdout, re.MULTILINE):
        addresses[int(number)] = address.lower()
    return addresses


def _node_of_device(address: str, system: Path) -> int | None:
    """Return the NUMA node of a PCI device; None where the kernel has none (-1)."""
    path = system / "sys/bus/pci/devices" / address / "numa_node"
    with suppress(OSError, ValueError):
        node = int(path.read_text(encoding="ascii"))
        if node >= 0:
            return node
    return None


def divide(host: HostCores, near: Sequence[int | None]) -> list[frozenset[int]]:
    """Return the processors of each rank: whole cores, and no core of two ranks.

    Ranks without a node share all cores, in the order of nodes. Ranks of one node share its cores;
    if there are fewer cores than ranks, each of them has all of the node.

    Args:
        host: its usable cores.
        near: NUMA node of each rank's device; None for every rank, or for none.
    """
    every_core = list(chain.from_iterable(host.nodes.values()))
    processors: list[frozenset[int]] = []
    places = Counter[int | None]()  # ranks of each node so far
    for node in near:
        cores = every_core
        if node is not None:
            cores = list(host.nodes[node])
        sharing = near.count(node)
        first = len(cores) * places[node] // sharing
        places[node] += 1
        end = len(cores) * places[node] // sharing
        if len(cores) < sharing:
            first = 0
            end = len(cores)
        processors.append(_processors([cores[first:end]]))
    return processors


def _described(host: HostCores, processors: Sequence[frozenset[int]]) -> str:
    """Describe the cores of each rank, and their NUMA nodes."""
    node_of = {}
    for number, cores in host.nodes.items():
        for processor in _processors([cores]):
            node_of[processor] = number
    parts = []
    for rank, its in enumerate(processors):
        nodes = _ranges(frozenset(map(node_of.__getitem__, its)))
        parts.append(f"local rank {rank}: {_ranges(its)} of node {nodes}")
    return "; ".join(parts)


def _processors(nodes: Iterable[Sequence[tuple[int, ...]]]) -> frozenset[int]:
    """Return all processors of lists of cores."""
    cores = chain.from_iterable(nodes)
    return frozenset(chain.from_iterable(cores))


def _ranges(numbers: set[int] | frozenset[int]) -> str:
    """Write numbers as the kernel does: ``0-3,8``."""
    parts = []
    for first in sorted(numbers):
        if first - 1 in numbers:
            continue
        last = first
        while last + 1 in numbers:
            last += 1
        parts.append(_range(first, last))
    return ",".join(parts)


def _range(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}"


def _read_list(path: Path) -> frozenset[int] | None:
    """Read a file of numbers as the kernel writes them; None if there is no such file."""
    numbers: set[int] = set()
    try:
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            if first:
                numbers.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return None
    return frozenset(numbers)
