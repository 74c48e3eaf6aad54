"""Time of collectives between devices, as in NCCL's own model (`tuning.cc`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from framework.plan.devices import Device, Machine
from framework.plan.memory import NotEstimatedError


@dataclass(frozen=True)
class _Protocol:
    """One of NCCL's ways to send, of a ring.

    Attributes:
        start: seconds before the first byte.
        link: seconds of a step to the next device of a host.
        hop: of a step to the next host, as a share of the network's listed latency, which is that
            of the protocol for large messages.
        bandwidth: share of the bandwidth that is data.
    """

    start: float
    link: float
    hop: float
    bandwidth: float


# NCCL's tuning.cc (`baseLat`, `hwLat`, and the share of data of LL128), as torch has it in
# _inductor/comm_analysis.py: the protocol of large messages over NVLink and over PCIe, and that of
# smaller ones, which NCCL takes over NVLink alone.
_SIMPLE: Final = _Protocol(8.4e-6, 3.4e-6, 1.0, 1.0)
_OVER_PCIE: Final = _Protocol(8.4e-6, 5.7e-6, 1.0, 1.0)
_LL128: Final = _Protocol(14e-6, 1.9e-6, 4.0 / 14.0, 0.92)
# Bytes per second of one direction: NVLink has more, PCIe 5 less.
_PCIE: Final = 64e9
# Switches of NVLink 4 and later add up by themselves (NVLS): how many times as fast as a ring an
# all-reduce over a number of devices is, measured with nccl-tests on eight H200 at 8 GiB
# (stas00/ml-engineering network/README.md, section SHARP). Other collectives gain nothing.
_SWITCH_GAIN: Final = {5: 1.14, 6: 1.19, 7: 1.26, 8: 1.29}


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
        """Return the seconds of a sum of `size` bytes over ranks that lie `stride` apart, in a
        ring, in a tree or in the switch of a host.
        """
        inside, hosts = self._placed(ranks, stride)
        sent = 2 * (ranks - 1) / ranks * size / self._ring_bandwidth(inside, hosts)
        if hosts == 1:
            sent /= self._switch_gain(ranks)
        tree = 2 * ((inside - 1) * self._large.link + log2(hosts) * self._hop)
        in_tree = self._start + tree + sent
        return min(self._in_ring(2, ranks, hosts, sent), in_tree)

    def scatter(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a gather, a scattered sum or an exchange over ranks that lie
        `stride` apart; `size`: bytes of all ranks together. NCCL has rings alone for them.
        """
        inside, hosts = self._placed(ranks, stride)
        sent = (ranks - 1) / ranks * size / self._ring_bandwidth(inside, hosts)
        return self._in_ring(1, ranks, hosts, sent)

    def _in_ring(self, rounds: int, ranks: int, hosts: int, sent: float) -> float:
        """Return the seconds of a collective around a ring by the faster protocol: a hop to each
        host, and a link to each other rank, in each round.

        `sent`: seconds of its bytes.
        """
        measured = self.machine.all_reduce_latency_seconds
        if measured is not None and hosts == 1 and rounds == 2:
            return measured + sent
        seconds = []
        for protocol in self._protocols:
            start = protocol.start if measured is None else measured
            hops = hosts if hosts > 1 else 0
            step = (ranks - hosts) * protocol.link + hops * protocol.hop * self._hop
            seconds.append(start + rounds * step + sent / protocol.bandwidth)
        return min(seconds)

    @property
    def _has_nvlink(self) -> bool:
        """Whether devices of a host are connected by more than PCIe."""
        device = self.machine.device
        link = device.link_bytes_per_second or device.collective_bytes_per_second or 0.0
        return link > _PCIE

    @property
    def _large(self) -> _Protocol:
        """The protocol of large messages."""
        return _SIMPLE if self._has_nvlink else _OVER_PCIE

    @property
    def _protocols(self) -> tuple[_Protocol, ...]:
        """Those that NCCL chooses from."""
        if self._has_nvlink:
            return _SIMPLE, _LL128
        return (_OVER_PCIE,)

    def _switch_gain(self, ranks: int) -> float:
        """Return how many times as fast as a ring the switch of a host adds up; a bandwidth that
        was measured has it already.
        """
        device = self.machine.device
        is_new = device.capability is not None and device.capability >= (9, 0)
        is_listed = self.machine.origin("collective_bytes_per_second") == "listed"
        if not (is_new and is_listed and self._has_nvlink):
            return 1.0
        return _SWITCH_GAIN.get(ranks, 1.0)

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
        return self.machine.all_reduce_latency_seconds or self._large.start

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
