"""Time of collectives between devices, as in NCCL's own model (`tuning.cc`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from framework.plan.devices import Device, Machine
from framework.plan.memory import NotEstimatedError

# NCCL's tuning.cc: start of a ring, and a step over NVLink, both with the protocol of large
# messages.
_START_SECONDS: Final = 8.4e-6
_LINK_SECONDS: Final = 3.4e-6


@dataclass(frozen=True)
class Collectives:
    """Seconds of collectives on a machine.

    Attributes:
        machine: devices and network.
        network_share: share of the network's bandwidth that large collectives reach.
    """

    machine: Machine
    network_share: float

    def all_reduce(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a sum of `size` bytes over ranks that lie `stride` apart, in a ring
        or in a tree.
        """
        inside, hosts = self._placed(ranks, stride)
        ring = 2 * self._ring_latency(ranks, hosts)
        tree = 2 * ((inside - 1) * _LINK_SECONDS + log2(hosts) * self._hop)
        latency = _START_SECONDS + min(ring, tree)
        if hosts == 1 and self.machine.all_reduce_latency_seconds is not None:
            latency = self.machine.all_reduce_latency_seconds
        return latency + 2 * (ranks - 1) / ranks * size / self._ring_bandwidth(inside, hosts)

    def scatter(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a gather, a scattered sum or an exchange over ranks that lie
        `stride` apart; `size`: bytes of all ranks together.
        """
        inside, hosts = self._placed(ranks, stride)
        sent = (ranks - 1) / ranks * size / self._ring_bandwidth(inside, hosts)
        return self._start + self._ring_latency(ranks, hosts) + sent

    def _ring_latency(self, ranks: int, hosts: int) -> float:
        """Return the seconds of all steps of a ring without their bytes: a hop to each host, and a
        link to each other rank.
        """
        hops = hosts if hosts > 1 else 0
        return (ranks - hosts) * _LINK_SECONDS + hops * self._hop

    def send(self, size: float, ranks: int, tensor: int, *, in_parts: bool = True) -> float:
        """Return the seconds of a transfer to the next pipeline stage, which lies `ranks` groups of
        `tensor` ranks away.

        With `in_parts` tensor-parallel ranks send a part each, and gather them (DeepSpeed's
        `pipe_partitioned`, and Megatron-LM); otherwise each sends all of it.
        """
        inside, hosts = self._placed(2, ranks * tensor)
        hop = 0.0
        if hosts > 1:
            hop = self._hop
        gathered = 0.0
        num_parts = 1
        if in_parts and tensor > 1:
            gathered = self.scatter(size, tensor, 1)
            num_parts = tensor
        sent = size / num_parts / self._ring_bandwidth(inside, hosts)
        return self._start + hop + sent + gathered

    def _placed(self, ranks: int, stride: int) -> tuple[int, int]:
        """Return how many members of a group are on one host, and on how many hosts it is.

        Members lie `stride` ranks apart: 1 for tensor groups; sequence, data and pipe follow.
        """
        inside = min(ranks, max(self.machine.devices_per_host // stride, 1))
        return inside, ceil(ranks / inside)

    @property
    def _start(self) -> float:
        """Seconds before the first byte of a collective."""
        return self.machine.all_reduce_latency_seconds or _START_SECONDS

    @property
    def _hop(self) -> float:
        """Seconds of a hop between hosts."""
        network = self.machine.network
        return network.latency_seconds if network else 0.0

    def _ring_bandwidth(self, inside: int, hosts: int) -> float:
        """Return the bytes per second of a ring: the least of the links within a host and of the
        network of its `inside` members on each host.

        Raises:
            NotEstimatedError: a bandwidth that the ring needs is not known.
        """
        device = self.machine.device
        network = self.machine.network
        links = device.collective_bytes_per_second or device.link_bytes_per_second
        if inside > 1:
            links = needed(links, "bandwidth between devices", device)
        if hosts == 1:
            return links or 0.0
        per_device = network.bytes_per_second if network else None
        between = needed(per_device, "network between hosts", device)
        across = self.network_share * between * inside
        if inside == 1:
            return across
        return min(across, links or across)


def needed(figure: float | None, what: str, device: Device) -> float:
    """Return a figure of a device; raises NotEstimatedError if it is not known."""
    if figure is None:
        raise NotEstimatedError(f"the {what} of {device.name} is not known")
    return figure
