"""`batch`: how many samples make a step. The arithmetic is in `framework/plan/layout.py`, and only there."""

from __future__ import annotations

from framework.config.base import PositiveCount, Section


class Batch(Section):
    """global_size = micro_size x accumulation_steps x data-parallel size; any one of the three may be left out."""

    global_size: PositiveCount | None = None
    """Samples per optimizer step, over all devices."""
    micro_size: PositiveCount | None = None
    """Samples per forward pass on one device."""
    accumulation_steps: PositiveCount | None = None
    """Forward passes per optimizer step on one device."""
