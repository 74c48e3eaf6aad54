"""Rates of devices and networks: listed in `devices.json` with their sources, or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from framework.errors import UsageError
from framework.text.typos import nearest

_DTYPES: Final = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Device:
    """One accelerator. None, or a type that is left out: not known, or it has no such unit.

    Attributes:
        name: as ``--gpu`` takes it.
        memory_bytes: memory of one device.
        flops_per_second: type of numbers -> peak of matrix products, without sparsity.
        memory_bytes_per_second: bandwidth of its memory.
        link_bytes_per_second: to the other devices of its host, one direction, peak.
        collective_bytes_per_second: of large collectives within a host, as NCCL counts them (bus
            bandwidth).
        host_bytes_per_second: to and from host memory, one direction, peak.
        matmul_flops_per_second: the most that bf16 matrix products reached when others measured
            them.
        host_memory_bytes_per_second: of a whole host as it is usual with it.
        capability: CUDA compute capability.
        network: the fabric that hosts with it usually have, one of those listed.
    """

    name: str
    memory_bytes: int | None = None
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None
    collective_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    matmul_flops_per_second: float | None = None
    host_memory_bytes_per_second: float | None = None
    capability: tuple[int, int] | None = None
    network: str | None = None


@dataclass(frozen=True)
class Network:
    """Network between hosts: bytes per second of one device, one direction, and seconds of one
    hop.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, so many in a host, and what connects the hosts.

    Attributes:
        device: its rates.
        network: between hosts; None: not known.
        devices_per_host: on each host.
        step_overhead_seconds: time of an optimizer step that is no device's: measured, else None.
        all_reduce_latency_seconds: of one small sum over the devices of a host: measured, else
            None.
        engine_seconds: ZeRO stage -> what the engine takes beside the model, measured where nothing
            hides it: as ``plan --measure`` names it. Empty: not known, or hidden behind a device's
            work.
        measured: names of figures that were measured; all others are listed.
    """

    device: Device
    network: Network | None = None
    devices_per_host: int = 8
    step_overhead_seconds: float | None = None
    all_reduce_latency_seconds: float | None = None
    engine_seconds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()

    def overhead_seconds(
        self, stage: int, *, sizes: Sequence[int], micro_batches: int, persistent: int
    ) -> float:
        """Seconds of an optimizer step that are spent in Python and not in operations.

        Args:
            stage: of ZeRO.
            sizes: elements of each weight.
            micro_batches: of the step.
            persistent: elements up to which a weight stays whole at stage 3.
        """
        if not self.engine_seconds:
            return self.step_overhead_seconds or 0.0
        own = self.engine_seconds[stage]
        per_weight = (
            own["seconds_per_weight"] + (micro_batches - 1) * own["seconds_per_weight_again"]
        )
        gathered = own.get("seconds_per_gathered_weight", 0.0) * sum(
            size > persistent for size in sizes
        )
        return own["seconds"] + len(sizes) * per_weight + micro_batches * gathered

    @staticmethod
    def listed(gpu: str, *, devices_per_host: int = 8, network: str | None = None) -> Machine:
        """Build a machine from the tables; without a network's name the one that is usual for the
        device.

        Raises:
            UsageError: the device or the network is not listed.
        """
        device = find_device(gpu)
        fabric = network or device.network
        return Machine(device, None if fabric is None else find_network(fabric), devices_per_host)

    @staticmethod
    def from_measured(
        found: Mapping[str, Any], base: Machine | None = None, *, devices_per_host: int = 1
    ) -> Machine:
        """Build a machine from measured values, over the listed ones of `base`.

        Args:
            found: ``flops_per_second`` by type of numbers, ``memory_bytes_per_second``,
                ``host_bytes_per_second``, ``all_reduce_bytes_per_second``,
                ``all_reduce_latency_seconds``, ``per_step_overhead_seconds``; any of them may be
                left out or None.
            base: where the figures come from that were not measured; None: they stay unknown.
            devices_per_host: without a base.
        """
        base = base or Machine(Device("measured"), None, devices_per_host)
        known = {key: value for key, value in found.items() if value is not None}
        flops = {
            dtype: float(value)
            for dtype, value in known.get("flops_per_second", {}).items()
            if value is not None
        }
        rates: dict[str, Any] = {
            name: float(known[key]) for key, name in _MEASURED_RATES.items() if key in known
        }
        if flops:  # they were reached, by no more than themselves
            rates["matmul_flops_per_second"] = flops.get("bf16")
        device = replace(
            base.device, flops_per_second={**base.device.flops_per_second, **flops}, **rates
        )
        own: dict[str, Any] = {
            name: float(known[key]) for key, name in _MEASURED_TIMES.items() if key in known
        }
        if not known.get("hides_overhead", True):
            stages = known["step_overhead_by_stage"].items()
            own["engine_seconds"] = {int(stage): dict(times) for stage, times in stages}
        names = {*(f"flops_per_second.{dtype}" for dtype in flops), *rates, *own}
        return replace(base, device=device, measured=base.measured | names, **own)

    def origin(self, figure: str) -> Literal["listed", "measured"]:
        """Whether a figure, such as ``flops_per_second.bf16``, was measured here or is listed."""
        return "measured" if figure in self.measured else "listed"

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, each with its origin; those that are not known are left
        out.
        """
        device = self.device
        network = self.network
        figures: dict[str, float | None] = {
            "memory_bytes": device.memory_bytes,
            **{
                f"flops_per_second.{dtype}": value
                for dtype, value in device.flops_per_second.items()
            },
            **{name: getattr(device, name) for name in _RATES},
            **{name: getattr(self, name) for name in _MEASURED_TIMES.values()},
            "network_bytes_per_second": network.bytes_per_second if network else None,
            "network_latency_seconds": network.latency_seconds if network else None,
        }
        known = {name: value for name, value in figures.items() if value is not None}
        return {
            "device": device.name,
            "network": network and network.name,
            "devices_per_host": self.devices_per_host,
            "figures": {
                name: {"value": value, "origin": self.origin(name)} for name, value in known.items()
            },
        }


_RATES: Final = (
    "memory_bytes_per_second",
    "link_bytes_per_second",
    "collective_bytes_per_second",
    "host_bytes_per_second",
    "host_memory_bytes_per_second",
    "matmul_flops_per_second",
)
_MEASURED_RATES: Final = {
    "memory_bytes_per_second": "memory_bytes_per_second",
    "all_reduce_bytes_per_second": "collective_bytes_per_second",
    "host_bytes_per_second": "host_bytes_per_second",
    "host_memory_bytes_per_second": "host_memory_bytes_per_second",
}
_MEASURED_TIMES: Final = {
    "per_step_overhead_seconds": "step_overhead_seconds",
    "all_reduce_latency_seconds": "all_reduce_latency_seconds",
}


@cache
def tables() -> Mapping[str, Any]:
    """The file of devices and networks, as it stands."""
    text = Path(__file__).with_name("devices.json").read_text(encoding="utf-8")
    return MappingProxyType(json.loads(text))


def value_of(figure: Any) -> Any:
    """A figure without its sources."""
    if isinstance(figure, dict):
        return figure["value"]
    return figure


def find_device(name: str) -> Device:
    """A device by its name, such as ``h100-80gb``.

    Raises:
        UsageError: it is not listed.
    """
    figures = _listed("devices", "--gpu", name)
    peaks = {dtype: 1e12 * peak for dtype in _DTYPES if (peak := figures[f"tflops_{dtype}"])}
    best = figures["matmul_tflops_bf16"]
    return Device(
        name.lower(),
        flops_per_second=peaks,
        matmul_flops_per_second=1e12 * best if best else None,
        capability=tuple(figures["capability"]) if figures["capability"] else None,
        **{key: figures[key] for key in ("memory_bytes", *_RATES[:-1], "network")},
    )


def find_network(name: str) -> Network:
    """A network by its name, such as ``infiniband-hdr``.

    Raises:
        UsageError: it is not listed.
    """
    return Network(name.lower(), **_listed("networks", "network", name))


def _listed(table: str, what: str, name: str) -> dict[str, Any]:
    listed = tables()[table]
    wanted = name.lower()
    if wanted not in listed:
        meant = nearest(wanted, listed) or next(
            (known for known in listed if known.startswith(wanted)), None
        )
        if meant:
            guess = f"did you mean {meant}? "
        else:
            guess = ""
        raise UsageError(f"{what} {name}: not known; {guess}known are {', '.join(listed)}")
    return {key: value_of(figure) for key, figure in listed[wanted].items()}
