"""Devices that a strategy is searched for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from framework.plan.alternatives import size_text
from framework.plan.device_overhead import beside_tensors
from framework.plan.devices import Machine
from framework.plan.memory import Memory
from framework.plan.plan import Plan

MARGIN: Final = "margin"
"""Component of `Memory.beside`: what ``run.memory_margin`` leaves free, as estimates err."""


@dataclass(frozen=True)
class Hardware:
    """Devices that a strategy is searched for.

    Attributes:
        name: of the device, such as ``h100-80gb``; empty if no device is named.
        memory_bytes: of one device; None: not known, so that everything fits.
        host_bytes: memory of a host, which the ranks on it share; None: not known.
        machine: rates of devices and network; None: how fast they are is not known.
        rates: how they were measured, in words; empty: they are listed.
    """

    name: str = ""
    memory_bytes: int | None = None
    host_bytes: int | None = None
    machine: Machine | None = None
    rates: str = ""

    @property
    def text(self) -> str:
        """The devices, and where their rates come from."""
        return ", ".join(text for text in (self.name, self.rates) if text)

    def usable_bytes(self, memory: Memory) -> int | None:
        """Return the bytes of a device that are left to tensors, without the margin; None: its
        memory is not known.
        """
        if self.memory_bytes is None:
            return None
        return max(self.memory_bytes - sum(memory.beside.values()), 0)

    def with_beside(self, memory: Memory, plan: Plan) -> Memory:
        """Return a plan's memory with what it takes of these devices beside its tensors, and the
        margin that the run's config leaves free (`MARGIN`).
        """
        beside = beside_tensors(memory, plan, self.name, self.memory_bytes)
        share = plan.config.run.memory_margin
        if self.memory_bytes is not None and share:
            beside[MARGIN] = int(share * max(self.memory_bytes - sum(beside.values()), 0))
        return replace(memory, beside=beside)

    def usable_text(self, memory: Memory) -> str:
        """Return the usable bytes, and the margin beside them, in words; empty: not known."""
        limit = self.usable_bytes(memory)
        if limit is None:
            return ""
        text = f"{size_text(limit)} usable"
        margin = memory.beside.get(MARGIN, 0)
        if margin:
            text += f" (run.memory_margin: {margin / (limit + margin):.3g})"
        return text

    def host_text(self, memory: Memory, ranks_per_host: int) -> str:
        """Return what the ranks of a host take of its memory, and whether it was held against what
        a host has, in words; empty if they take nothing.
        """
        on_host = host_bytes(memory, ranks_per_host)
        if not on_host:
            return ""
        text = f"{size_text(on_host)} on each host"
        if ranks_per_host > 1:
            text += f", {size_text(on_host / ranks_per_host)} a rank"
        if self.host_bytes is None:
            return f"{text}; not checked, as --host_memory is not given"
        return f"{text}, of {size_text(self.host_bytes)}"

    def machine_to_rank(self, devices_per_host: int) -> Machine:
        """Return the devices with every rate that is not known taken from a usual card on PCIe, so
        that strategies can be ranked by all that they compute and send.
        """
        usual = _usual_card(devices_per_host)
        if self.machine is None:
            return usual
        return self.machine.completed(usual)

    def lacking(self, memory: Memory, ranks_per_host: int) -> str:
        """Return the reason why a run does not fit its devices or a host, which holds the parts of
        `ranks_per_host` ranks; empty if it does, or if their memory is not known.
        """
        limit = self.usable_bytes(memory)
        peak_bytes = memory.total(memory.peak)
        if self.name == "cpu":  # what lies on the host is in the same memory
            peak_bytes += sum(memory.host.values())
        if limit is not None and peak_bytes > limit:
            usable = self.usable_text(memory)
            return f"each rank takes {size_text(peak_bytes)}, and {self.name} has {usable}"
        on_host = host_bytes(memory, ranks_per_host)
        if self.host_bytes is not None and on_host > self.host_bytes:
            host = size_text(self.host_bytes)
            return f"each host would hold {size_text(on_host)}, and has {host}"
        return ""


def host_bytes(memory: Memory, ranks_per_host: int) -> int:
    """Return the bytes that all ranks of a host take of its memory."""
    return sum(memory.host.values()) * ranks_per_host


# A card of today without links of its own, the host of its size, and a network of 100 Gb/s.
USUAL_CARD: Final = "l4-24gb"
_USUAL_HOST: Final = "a100-40gb"
_USUAL_NETWORK: Final = "infiniband-edr"


@cache
def _usual_card(devices_per_host: int) -> Machine:
    host = Machine.listed(_USUAL_HOST, network=_USUAL_NETWORK)
    card = Machine.listed(USUAL_CARD, devices_per_host=devices_per_host, network=_USUAL_NETWORK)
    return card.completed(host)


UNKNOWN: Final = Hardware()
