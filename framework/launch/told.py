"""What is said before a start: every value with the place it came from, and the plain command that trains the same."""

from __future__ import annotations

import sys

from framework.launch.topology import Topology
from framework.output import write


def told(topology: Topology) -> list[str]:
    """Every value that was decided, and where it came from."""
    values = {"nnodes": topology.nnodes, "node_rank": topology.node_rank, "slots": topology.slots,
              "master_addr": topology.master_addr, "master_port": topology.master_port}  # fmt: skip
    rows = [f"{name:<12}{value} ({topology.sources[name]})" for name, value in values.items() if name in topology.sources]
    nodes = "1 node" if topology.nnodes == 1 else f"{topology.nnodes} nodes"
    ranks = "1 rank" if topology.slots == 1 else f"{topology.slots} ranks"
    return [*rows, f"{'world size':<12}{topology.world_size} = {nodes} x {ranks}"]


def tell(topology: Topology, plain: str, *further: str) -> None:
    """Print the values, the command that could be pasted, and whatever else there is to know."""
    for line in [*told(topology), f"plain command: {plain}", *further]:
        write(sys.stdout, f"launch: {line}\n")
