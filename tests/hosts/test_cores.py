"""Cores of ranks: read from a written tree of the kernel's files, and divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from framework.hosts import cores
from framework.hosts.cores import Binding, bind_ranks, device_nodes, read_cores
from framework.hosts.devices import LocalDevices

CPU = LocalDevices("cpu", 0)
FOUR_GPUS = LocalDevices("cuda", 4)


class Host:
    """A tree of the kernel's files: NUMA nodes of cores with two processors each, and GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        """Write one file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def nodes(self, num_nodes: int, cores_per_node: int) -> frozenset[int]:
        """Write nodes; processor p shares its core with p + the number of cores, as on Intel's."""
        num_cores = num_nodes * cores_per_node
        for node in range(num_nodes):
            first = node * cores_per_node
            last = first + cores_per_node - 1
            text = f"{first}-{last},{first + num_cores}-{last + num_cores}"
            self.write(f"sys/devices/system/node/node{node}/cpulist", text)
        for processor in range(2 * num_cores):
            core = processor % num_cores
            folder = f"sys/devices/system/cpu/cpu{processor}/topology"
            self.write(f"{folder}/thread_siblings_list", f"{core},{core + num_cores}")
        self.write("sys/devices/system/cpu/online", f"0-{2 * num_cores - 1}")
        return frozenset(range(2 * num_cores))

    def gpus(self, nodes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Write GPUs, and let the driver's program list them."""
        addresses = {}
        for number, node in enumerate(nodes):
            addresses[number] = f"0000:{0x1A + number:02x}:00.0"
            self.write(f"sys/bus/pci/devices/{addresses[number]}/numa_node", str(node))
        monkeypatch.setattr(cores, "_addresses", lambda: addresses)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return an empty tree."""
    return Host(tmp_path)


def test_ranks_share_a_node_in_whole_cores(host: Host) -> None:
    usable = host.nodes(2, 4)
    binding = bind_ranks("auto", CPU, 4, system=host.root, usable=usable)
    assert binding.processors == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]
    assert binding.threads() == 4
    assert "local rank 3: 6-7,14-15 of node 1" in binding.line


@pytest.mark.parametrize(
    ("nodes", "processors"),
    [
        # two GPUs at each node, numbered across
        ([1, 0, 1, 0], [{4, 5, 12, 13}, {0, 1, 8, 9}, {6, 7, 14, 15}, {2, 3, 10, 11}]),
        ([0, 0, 0, 1], [{0, 8}, {1, 9}, {2, 3, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
    ],
)
def test_a_rank_is_near_its_gpu(
    host: Host, monkeypatch: pytest.MonkeyPatch, nodes: list[int], processors: list[set[int]]
) -> None:
    usable = host.nodes(2, 4)
    host.gpus(nodes, monkeypatch)
    binding = bind_ranks("auto", FOUR_GPUS, 4, system=host.root, usable=usable)
    assert binding.processors == processors
    assert binding.threads() == min(map(len, processors))


def test_ranks_take_their_devices_in_order_of_numbers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.gpus([0, 1, 0, 1], monkeypatch)
    chosen = LocalDevices("cuda", 3, chosen=(3, 2, 0))
    assert device_nodes(chosen, 2, system=host.root) == [0, 0]  # devices 0 and 2


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([0, 0, 0, 0], "cores of NUMA node 1, which has no device of a rank, would be idle"),
        ([0, 0, 1, -1], "the NUMA node of a device is not known"),
        ([0, 0, 1, 2], "or has no usable core"),
    ],
)
def test_what_is_not_known_binds_no_rank(
    host: Host, monkeypatch: pytest.MonkeyPatch, nodes: list[int], reason: str
) -> None:
    usable = host.nodes(2, 4)
    host.gpus(nodes, monkeypatch)
    binding = bind_ranks("auto", FOUR_GPUS, 4, system=host.root, usable=usable)
    assert binding == Binding()
    assert reason in binding.line
    assert len(bind_ranks("on", FOUR_GPUS, 4, system=host.root, usable=usable).processors) == 4


@pytest.mark.parametrize(
    ("devices", "num_ranks", "num_nodes", "reason"),
    [
        (CPU, 2, 1, "one NUMA node"),
        (LocalDevices("cuda", 1), 1, 2, "one rank has all cores"),
        (CPU, 9, 2, "8 cores for 9 ranks"),
    ],
)
def test_auto_leaves_a_host_without_a_choice(
    host: Host, devices: LocalDevices, num_ranks: int, num_nodes: int, reason: str
) -> None:
    usable = host.nodes(num_nodes, 4)
    binding = bind_ranks("auto", devices, num_ranks, system=host.root, usable=usable)
    assert binding.line == f"ranks are not bound: {reason}"
    assert binding.processors == ()
    assert binding.threads() is None


def test_several_gpus_at_one_node_share_it(host: Host) -> None:
    usable = host.nodes(1, 4)
    binding = bind_ranks("auto", FOUR_GPUS, 4, system=host.root, usable=usable)
    assert binding.processors == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/pod", "sys/fs/cgroup/cpuset.cpus.effective": "0-5,8-13"},
        {"proc/self/cgroup": "0::/pod", "sys/fs/cgroup/pod/cpuset.cpus.effective": "0-5,8-13"},
        {
            "proc/self/cgroup": "3:cpuset:/pod\n1:cpu:/",
            "sys/fs/cgroup/cpuset/pod/cpuset.effective_cpus": "0-5,8-13",
        },
    ],
)
def test_a_container_is_divided_and_not_left(host: Host, files: Mapping[str, str]) -> None:
    host.nodes(2, 4)
    for path, text in files.items():
        host.write(path, text)
    usable = frozenset({0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13})
    binding = bind_ranks("auto", CPU, 2, system=host.root, usable=usable)
    assert binding.processors == [{0, 1, 2, 8, 9, 10}, {3, 4, 5, 11, 12, 13}]
    narrower = bind_ranks("auto", CPU, 2, system=host.root, usable=usable - {0})
    assert narrower.line == (
        "ranks are not bound: 1-5,8-13 is what this process was bound to before"
    )
    forced = bind_ranks("on", CPU, 2, system=host.root, usable=usable - {0})
    assert frozenset().union(*forced.processors) == usable - {0}


def test_a_host_without_lists_is_one_node(tmp_path: Path) -> None:
    host = read_cores(system=tmp_path, usable=frozenset({3, 5}))
    assert host.nodes == {0: [(3,), (5,)]}
    assert not host.is_narrowed


def test_off_reads_nothing(tmp_path: Path) -> None:
    binding = bind_ranks("off", CPU, 2, system=tmp_path, usable=frozenset())
    assert binding == Binding(line="")
    assert binding.line == "ranks are not bound (--bind_cores off)"


def test_addresses_are_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 00000000:3B:00.0'; echo '1, 00000001:AF:00.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert cores._addresses() == {0: "0000:3b:00.0", 1: "0001:af:00.0"}
