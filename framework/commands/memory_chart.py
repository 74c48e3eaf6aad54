"""A chart of memory by component over strategies: stacked bars, and the device's limit."""

from __future__ import annotations

from collections.abc import Sequence

from framework.commands.strategies import BUFFERS, MEMORY_GROUPS, grouped
from framework.plan.candidate import Candidate
from framework.plan.search_space import OFFLOAD, RECOMPUTE, SIZES, STAGE
from framework.report.bar_chart import bar_chart
from framework.report.figures import size


def draw_chart(candidates: Sequence[Candidate], *, limit_bytes: int | None, title: str) -> str:
    """Draw each candidate's fullest moment as a bar of its components; returns an SVG file.

    Args:
        candidates: strategies, the best one first; it is drawn on top.
        limit_bytes: usable memory of a device, drawn as a line; None: not known.
        title: name of the run.
    """
    bars = []
    for candidate in candidates:
        memory = candidate.memory
        groups = grouped(memory.moments[memory.peak], MEMORY_GROUPS, BUFFERS)
        bars.append((_name(candidate), list(groups.items())))
    limit = None
    if limit_bytes is not None:
        limit = (f"usable {size(limit_bytes)}", limit_bytes)
    about = f"{title}: estimated peak memory of a device"
    chart = bar_chart("memory", about, "GiB", bars, show=size, shown_unit=2**30, limit=limit)
    assert chart is not None, "every strategy takes memory"
    return chart.file()


def _name(candidate: Candidate) -> str:
    """Return a short name of a strategy: its stage, settings, and micro-batch x accumulation."""
    settings = candidate.settings
    layout = candidate.plan.layout
    parts = [f"ZeRO {settings.get(STAGE, candidate.plan.config.zero.stage)}"]
    if settings.get(OFFLOAD) == "cpu":
        parts.append("host")
    if settings.get(RECOMPUTE):
        parts.append("recompute")
    for key in SIZES:
        if settings.get(key, 1) > 1:
            parts.append(f"{key.rpartition('.')[2]} {settings[key]}")
    parts.append(f"{layout.micro_size} x {layout.accumulation_steps}")
    return ", ".join(parts)
