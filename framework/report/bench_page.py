"""Chart and page of a bench: how fast each variant trains, and what its steps are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from framework.errors import show_value
from framework.report.charts import step_bars
from framework.report.draw import Chart, bar_chart, text
from framework.report.figures import number, size, time_split
from framework.report.page import document, figures, table
from framework.report.records import flat
from framework.report.repeats import Variant

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
    where none ran.
    """
    ran = [each for each in variants if each.windows]
    bars = [(each.name, [("median", each.quartiles[1])]) for each in ran]
    spans = [(each.quartiles[0], each.quartiles[2], each.windows) for each in ran]
    chart = bar_chart("bench", "Samples per second", "samples/s: more is better", bars, spans=spans)
    return chart and replace(chart, columns=COLUMNS, rows=rows_of(variants))


def rows_of(variants: Sequence[Variant]) -> list[list[str]]:
    """Rows of a table with `COLUMNS`, one for each variant."""
    return [
        _row(each) if each.windows else [each.name, each.failure, *[""] * 6] for each in variants
    ]


def _row(variant: Variant) -> list[str]:
    mean, (low, middle, high), busy = variant.means(), variant.quartiles, variant.busy_cores
    memory = mean.get("memory/device_peak_bytes", mean.get("memory/host_peak_bytes", 0.0))
    tokens = mean.get("throughput/tokens_per_sec")
    return [
        *(
            variant.name,
            number(middle),
            f"{number(low)} to {number(high)}",
            number(tokens) if tokens else "",
        ),
        *(
            f"{number(mean['time/step_ms'])} ms",
            size(memory),
            " + ".join(str(len(start)) for start in variant.rounds),
        ),
        f"{min(busy):.1f} to {max(busy):.1f} cores" if busy else "",
    ]


def bench_page(
    title: str,
    variants: Sequence[Variant],
    sentences: Sequence[str],
    notes: Sequence[str],
    environment: Mapping[str, Any],
) -> str:
    """Make the page: what is faster, in sentences, and how that was found, in notes; charts, table,
    environment.
    """
    verdict = "".join(f"<p><strong>{text(line)}.</strong></p>" for line in sentences)
    verdict += "".join(f"<p>{text(note)}.</p>" for note in notes)
    splits = step_bars([(each.name, time_split(each.means())) for each in variants if each.windows])
    settings = [
        [each.name, each.settings, str(each.plan.cluster), str(each.plan.layout)]
        for each in variants
    ]
    facts = [[key, show_value(value)] for key, value in flat(environment).items()]
    sections = [
        ("Speed", figures([chart for chart in (speed_chart(variants), splits) if chart])),
        ("Figures", table(COLUMNS, rows_of(variants), label="Figures")),
        ("Variants", table(("", "settings", "devices", "samples"), settings, label="Variants")),
        ("Environment", table(("", "value"), facts, label="Environment")),
    ]
    top = f'<div class="verdict" style="border-left-color:var(--l0)">{verdict}</div>'
    return document(title, sections, about="Bench", top=top)
