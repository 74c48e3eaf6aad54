"""Chart and page of a bench: how fast each variant trains, and what its steps are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from framework.errors import show_value
from framework.report.bar_chart import bar_chart
from framework.report.chart import Chart, text
from framework.report.figures import number, size, time_split
from framework.report.page import document, figures, table
from framework.report.records import flat
from framework.report.repeats import Variant
from framework.report.run_charts import step_bars

COLUMNS: Final = (
    "",
    "samples/s",
    "middle half",
    "tokens/s",
    "step",
    "memory",
    "windows",
    "other work",
)


def speed_chart(variants: Sequence[Variant]) -> Chart | None:
    """Draw the median of every variant that ran as a bar, with its quartiles and every window; None
    if none ran.
    """
    bars = []
    spans = []
    for variant in variants:
        if variant.windows:
            low, middle, high = variant.quartiles
            bars.append((variant.name, [("median", middle)]))
            spans.append((low, high, variant.windows))
    chart = bar_chart("bench", "Samples per second", "samples/s: more is better", bars, spans=spans)
    if chart is None:
        return None
    return replace(chart, columns=COLUMNS, rows=rows_of(variants))


def rows_of(variants: Sequence[Variant]) -> list[list[str]]:
    """Return the rows of a table with `COLUMNS`, one for each variant."""
    return list(map(_row, variants))


def _row(variant: Variant) -> list[str]:
    if not variant.windows:
        return [variant.name, variant.failure, "", "", "", "", "", ""]
    mean = variant.means()
    low, middle, high = variant.quartiles
    tokens = mean.get("throughput/tokens_per_sec")
    memory = mean.get("memory/device_peak_bytes", mean.get("memory/host_peak_bytes", 0.0))
    busy = ""
    if variant.busy_cores:
        busy = f"{min(variant.busy_cores):.1f} to {max(variant.busy_cores):.1f} cores"
    return [
        variant.name,
        number(middle),
        f"{number(low)} to {number(high)}",
        number(tokens) if tokens else "",
        f"{number(mean['time/step_ms'])} ms",
        size(memory),
        " + ".join(map(str, map(len, variant.rounds))),
        busy,
    ]


def bench_page(
    title: str,
    variants: Sequence[Variant],
    sentences: Sequence[str],
    notes: Sequence[str],
    environment: Mapping[str, Any],
) -> str:
    """Make the page of a bench.

    Args:
        title: heading of the page.
        variants: what was measured.
        sentences: which variant is faster.
        notes: how that was found.
        environment: versions and devices.
    """
    splits = []
    settings = []
    for variant in variants:
        plan = variant.plan
        settings.append([variant.name, variant.settings, str(plan.cluster), str(plan.layout)])
        if variant.windows:
            splits.append((variant.name, time_split(variant.means())))
    charts = list(filter(None, (speed_chart(variants), step_bars(splits))))
    facts = [[key, show_value(value)] for key, value in flat(environment).items()]
    sections = [
        ("Speed", figures(charts)),
        ("Figures", table(COLUMNS, rows_of(variants), label="Figures")),
        ("Variants", table(("", "settings", "devices", "samples"), settings, label="Variants")),
        ("Environment", table(("", "value"), facts, label="Environment")),
    ]
    return document(title, sections, about="Bench", top=_verdict(sentences, notes))


def _verdict(sentences: Sequence[str], notes: Sequence[str]) -> str:
    paragraphs = ""
    for sentence in sentences:
        paragraphs += f"<p><strong>{text(sentence)}.</strong></p>"
    for note in notes:
        paragraphs += f"<p>{text(note)}.</p>"
    return f'<div class="outcome" style="border-left-color:var(--l0)">{paragraphs}</div>'
