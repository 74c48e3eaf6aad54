"""The setting beside the strategy that frees most memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from framework.plan.alternatives import alternatives, knobs, size_text
from framework.plan.candidate import judge
from framework.plan.hardware import Hardware
from framework.plan.plan import Plan
from framework.plan.work import ModelWork


@dataclass(frozen=True)
class Knob:
    """A setting beside the strategy, and the bytes that changing it frees on a device."""

    key: str
    before: Any
    after: Any
    freed_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.key} {_number(self.before)} -> {_number(self.after)} frees "
            f"{size_text(self.freed_bytes)}"
        )


def find_knob(
    plan: Plan, target: Hardware | None = None, *, work: ModelWork | None = None
) -> Knob | None:
    """Find the setting beside the strategy that frees most on the fullest rank; None if each frees
    less than one part in a hundred.
    """
    planned = judge(plan, work=work).peak_bytes
    lowered = []
    for key, before, after in knobs(plan, half=_half_type(target)):
        for alternative in alternatives(plan, [{key: after}], work=work):
            lowered.append(Knob(key, before, after, planned - alternative.peak_bytes))
    best = max(lowered, key=lambda knob: knob.freed_bytes, default=None)
    if best is not None and best.freed_bytes >= planned / 100:
        return best
    return None


def _half_type(target: Hardware | None) -> str:
    """Return the type of half width that a device computes in; bf16 if it is not known."""
    machine = target.machine if target else None
    if machine is not None and "bf16" not in machine.device.flops_per_second:
        return "fp16"
    return "bf16"


def _number(value: Any) -> str:
    if isinstance(value, int) and value > 9999:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)
