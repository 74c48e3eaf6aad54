"""Output of the launcher: before a start every value with its place, and the plain command that trains the same."""

from __future__ import annotations

import sys

from framework.launch.hosts.topology import Topology
from framework.system.output import write


def values_shown(topology: Topology) -> list[str]:
    """Every value that was decided, and where it came from."""
    values = {
        "nnodes": topology.nnodes,
        "node_rank": topology.node_rank,
        "slots": topology.slots,
        "master_addr": topology.master_addr,
        "master_port": topology.master_port or "free",
    }
    rows = [
        f"{name:<12}{value} ({topology.sources[name]})" for name, value in values.items() if name in topology.sources
    ]
    nodes = "1 node" if topology.nnodes == 1 else f"{topology.nnodes} nodes"
    ranks = "1 rank" if topology.slots == 1 else f"{topology.slots} ranks"
    return [*rows, f"{'world size':<12}{topology.world_size} = {nodes} x {ranks}"]


def show_settings(topology: Topology, plain: str, *further: str) -> None:
    """Print the values, the command that could be pasted, and whatever else there is to know."""
    for line in [*values_shown(topology), f"plain command: {plain}", *further]:
        write(sys.stdout, f"launch: {line}\n")


def print_line(text: str) -> None:
    """One line of the launcher."""
    write(sys.stderr, f"launch: {text}\n")
