"""Rates of devices and networks: listed in `devices.json` with their sources, or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from deepspeed_lint.text.typos import nearest
from framework.errors import UsageError

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
    """Hosts with devices of one kind, and what connects the hosts.

    Attributes:
        device: its rates.
        network: between hosts; None: not known.
        devices_per_host: on each host.
        step_overhead_seconds: time of an optimizer step that is no device's: measured, else None.
        all_reduce_latency_seconds: of one small sum over the devices of a host: measured, else
            None.
        engine_seconds: ZeRO stage -> what the engine takes beside the model, named as in ``plan
            --measure`` and measured where nothing hides it. Empty: not known, or hidden behind a
            device's work.
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
        """Return the seconds of an optimizer step that are spent in Python and not in operations.

        Args:
            stage: of ZeRO.
            sizes: elements of each weight.
            micro_batches: of the step.
            persistent: elements up to which a weight stays whole at stage 3.
        """
        if not self.engine_seconds:
            return self.step_overhead_seconds or 0.0
        seconds = self.engine_seconds[stage]
        again = (micro_batches - 1) * seconds["seconds_per_weight_again"]
        per_weight = seconds["seconds_per_weight"] + again
        num_gathered = sum(size > persistent for size in sizes)
        gathered = seconds.get("seconds_per_gathered_weight", 0.0) * num_gathered
        return seconds["seconds"] + len(sizes) * per_weight + micro_batches * gathered

    def completed(self, other: Machine) -> Machine:
        """Return this machine with the figures that it lacks taken from another one."""
        device = self.device
        lacking = {}
        for name in _LISTED_RATES:
            if getattr(device, name) is None:
                lacking[name] = getattr(other.device, name)
        if device.link_bytes_per_second is not None:  # the links of another kind do not count
            lacking.pop("collective_bytes_per_second", None)
        flops = {**other.device.flops_per_second, **device.flops_per_second}
        completed = replace(device, flops_per_second=flops, **lacking)
        return replace(self, device=completed, network=self.network or other.network)

    @staticmethod
    def listed(gpu: str, *, devices_per_host: int = 8, network: str | None = None) -> Machine:
        """Build a machine from the tables; without a network's name the one that is usual for the
        device.

        Raises:
            UsageError: the device or the network is not listed.
        """
        device = find_device(gpu)
        fabric = network or device.network
        if fabric is None:
            return Machine(device, None, devices_per_host)
        return Machine(device, find_network(fabric), devices_per_host)

    @staticmethod
    def from_measured(
        figures: Mapping[str, Any], base: Machine | None = None, *, devices_per_host: int = 1
    ) -> Machine:
        """Build a machine from measured values, over the listed ones of `base`.

        Args:
            figures: ``flops_per_second`` by type of numbers, ``memory_bytes_per_second``,
                ``host_bytes_per_second``, ``all_reduce_bytes_per_second``,
                ``all_reduce_latency_seconds``, ``host_memory_bytes_per_second``,
                ``per_step_overhead_seconds``; ``step_overhead_by_stage`` (`engine_seconds`) unless
                ``hides_overhead`` is true or left out. Any of them may be left out or None.
            base: where the figures come from that were not measured; None: they stay unknown.
            devices_per_host: without a base.
        """
        base = base or Machine(Device("measured"), None, devices_per_host)
        known = _without_none(figures)
        flops = _without_none(known.get("flops_per_second", {}))
        flops = {dtype: float(value) for dtype, value in flops.items()}
        rates: dict[str, Any] = _renamed(known, _MEASURED_RATES)
        if flops:  # a measured rate is also the most that products reach
            rates["matmul_flops_per_second"] = flops.get("bf16")
        all_flops = {**base.device.flops_per_second, **flops}
        device = replace(base.device, flops_per_second=all_flops, **rates)
        times: dict[str, Any] = _renamed(known, _MEASURED_TIMES)
        if not known.get("hides_overhead", True):
            stages = known["step_overhead_by_stage"].items()
            times["engine_seconds"] = {int(stage): dict(seconds) for stage, seconds in stages}
        names = {f"flops_per_second.{dtype}" for dtype in flops} | rates.keys() | times.keys()
        return replace(base, device=device, measured=base.measured | names, **times)

    def origin(self, figure: str) -> Literal["listed", "measured"]:
        """Return whether a figure, such as ``flops_per_second.bf16``, was measured or is listed."""
        if figure in self.measured:
            return "measured"
        return "listed"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures that are known as plain values, each with its origin."""
        known = {}
        for name, value in _without_none(self._figures()).items():
            known[name] = {"value": value, "origin": self.origin(name)}
        return {
            "device": self.device.name,
            "network": self.network.name if self.network else None,
            "devices_per_host": self.devices_per_host,
            "figures": known,
        }

    def _figures(self) -> dict[str, float | None]:
        """Return all figures by name; None: not known."""
        device = self.device
        figures: dict[str, float | None] = {"memory_bytes": device.memory_bytes}
        for dtype, flops in device.flops_per_second.items():
            figures[f"flops_per_second.{dtype}"] = flops
        for name in _RATES:
            figures[name] = getattr(device, name)
        for name in _MEASURED_TIMES.values():
            figures[name] = getattr(self, name)
        if self.network:
            figures["network_bytes_per_second"] = self.network.bytes_per_second
            figures["network_latency_seconds"] = self.network.latency_seconds
        return figures


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _renamed(known: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Return the measured values that are known, under the names of fields."""
    return {name: float(known[key]) for key, name in names.items() if key in known}


_LISTED_RATES: Final = (
    "memory_bytes_per_second",
    "link_bytes_per_second",
    "collective_bytes_per_second",
    "host_bytes_per_second",
    "host_memory_bytes_per_second",
)
_RATES: Final = (*_LISTED_RATES, "matmul_flops_per_second")
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
    """Return the contents of the file of devices and networks, each device with its row of the
    linter's table.
    """
    from deepspeed_lint.topology import gpu_rows

    text = Path(__file__).with_name("devices.json").read_text(encoding="utf-8")
    contents: dict[str, Any] = json.loads(text)
    for name, row in contents["devices"].items():
        row.update(gpu_rows()[name])
    return MappingProxyType(contents)


def value_of(figure: Any) -> Any:
    """Return a figure without its sources."""
    if isinstance(figure, dict):
        return figure["value"]
    return figure


def find_device(name: str) -> Device:
    """Return a device by its name, such as ``h100-80gb``.

    Raises:
        UsageError: it is not listed.
    """
    figures = _listed("devices", "--gpu", name)
    best = figures["matmul_tflops_bf16"]
    return Device(
        name.lower(),
        flops_per_second=_peaks(figures),
        matmul_flops_per_second=1e12 * best if best else None,
        capability=tuple(figures["capability"]) if figures["capability"] else None,
        memory_bytes=figures["memory_bytes"],
        network=figures["network"],
        **{key: figures[key] for key in _LISTED_RATES},
    )


def _peaks(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the peaks of a device's figures in FLOP/s, by the type of numbers."""
    peaks = {}
    for dtype in _DTYPES:
        teraflops = figures[f"tflops_{dtype}"]
        if teraflops:
            peaks[dtype] = 1e12 * teraflops
    return peaks


def find_network(name: str) -> Network:
    """Return a network by its name, such as ``infiniband-hdr``.

    Raises:
        UsageError: it is not listed.
    """
    return Network(name.lower(), **_listed("networks", "--network", name))


def _listed(table: str, what: str, name: str) -> dict[str, Any]:
    """Return the figures of a table's row without sources; raises UsageError, which names `what`,
    if it is not listed.
    """
    listed = tables()[table]
    wanted = name.lower()
    if wanted not in listed:
        guess = _guess(wanted, listed)
        raise UsageError(f"{what} {name}: not known; {guess}known are {', '.join(listed)}")
    return {key: value_of(figure) for key, figure in listed[wanted].items()}


def _guess(wanted: str, listed: Mapping[str, Any]) -> str:
    """Return a question for the listed name that is probably meant; empty if none is near."""
    meant = nearest(wanted, listed)
    if not meant:
        meant = next((known for known in listed if known.startswith(wanted)), None)
    if meant:
        return f"did you mean {meant}? "
    return ""
