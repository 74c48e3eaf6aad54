"""Charts of horizontal bars, which are divided into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from framework.report.chart import (
    REFERENCE,
    Chart,
    Frame,
    make_legend,
    shortened,
    svg_element,
    swatch,
    text,
    upright_lines,
)
from framework.report.chart_style import part_styles
from framework.report.figures import number

Bar = tuple[str, Sequence[tuple[str, float]]]
"""Label, and parts with their values."""


Span = tuple[float, float, Sequence[float]]
"""Ends of the middle half of a bar's measurements, and all of them."""


def bar_chart(
    slug: str,
    title: str,
    unit: str,
    bars: Sequence[Bar],
    *,
    show: Callable[[float], str] = number,
    shown_unit: float = 1.0,
    spans: Sequence[Span] = (),
    limit: tuple[str, float] | None = None,
) -> Chart | None:
    """Draw horizontal bars of parts; None if there is nothing to draw.

    Args:
        slug, title: name of the file, and of the chart.
        unit: of the values, as the axis names it.
        bars: label, and parts with their values.
        show: writes a value in legend and table.
        shown_unit: what a value is divided by on the axis.
        spans: for each bar the ends of the middle half of its measurements, and all of them.
        limit: a value to stay below, and its name.
    """
    names: dict[str, None] = {}
    labels = []
    sums = []
    descriptions = []
    for label, values in bars:
        labels.append(label)
        descriptions.append(bar_text(label, values, show))
        total = 0.0
        for name, value in values:
            names[name] = None
            total += value
        sums.append(total)
    most = _largest(sums, spans, limit)
    if not most > 0:
        return None
    style_of = part_styles(list(names))
    drawing = _BarDrawing(unit, bars, sums, most, style_of, show, shown_unit, spans, limit)
    height, parts = drawing.parts()
    svg = svg_element(slug, title, "; ".join(descriptions[:8]), (400, height), parts)
    rows = [_shares(name, bars, sums, show) for name in names]
    return Chart(slug, title, svg, ["part", *labels], rows)


def _largest(
    sums: Sequence[float], spans: Sequence[Span], limit: tuple[str, float] | None
) -> float:
    """Return the largest value to draw: of the bars, the spans and the limit; at least 0."""
    most = max([0.0, *sums])
    for _, high, points in spans:
        most = max(most, high, *points)
    if limit:
        most = max(most, limit[1])
    return most


@dataclass(frozen=True)
class _BarDrawing:
    """A chart of bars before it is drawn; see `bar_chart`.

    Attributes:
        sums: of the parts of each bar.
        most: the largest value.
        style_of: number of a part's colour.
    """

    unit: str
    bars: Sequence[Bar]
    sums: Sequence[float]
    most: float
    style_of: Mapping[str, int]
    show: Callable[[float], str]
    shown_unit: float
    spans: Sequence[Span]
    limit: tuple[str, float] | None

    def parts(self) -> tuple[float, list[str]]:
        """Return the height of the drawing, and its elements."""
        legend, top = make_legend(self._legend_entries(), 400)
        height = top + 34 * len(self.bars) + 40
        frame = Frame(14, top, 386, height - 36, 0, self.most / self.shown_unit, 0, 1)
        parts = [legend]
        parts += upright_lines(frame)
        unit = text(self.unit)
        parts.append(f'<text x="200" y="{height - 5:.1f}" text-anchor="middle">{unit}</text>')
        for row in range(len(self.bars)):
            parts += self._row(frame, row)
        if self.limit:
            x = frame.x(self.limit[1] / self.shown_unit)
            parts.append(f'<path class="r" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>')
        return height, parts

    def _legend_entries(self) -> list[tuple[str, str]]:
        entries = [(self._part_label(name), swatch(style)) for name, style in self.style_of.items()]
        if self.spans:
            entries.append(("middle half", _whisker(0, 18, 0)))
            entries.append(("one measurement", _POINT.format(9, 0)))
        if self.limit:
            entries.append((self.limit[0], REFERENCE))
        return entries

    def _part_label(self, name: str) -> str:
        """Return a part's name in the legend, with its value if there is a single bar."""
        if len(self.bars) > 1 or self.spans:
            return name
        value = dict(self.bars[0][1])[name]
        return f"{name} {self.show(value)} ({value / self.most:.0%})"

    def _row(self, frame: Frame, row: int) -> Iterator[str]:
        """Yield the elements of the bar with this number: its heading, its parts, and its span."""
        label, values = self.bars[row]
        y = frame.top + 34 * row + 14
        heading = f"{text(shortened(label, 44))}: {text(self.show(self.sums[row]))}"
        yield f'<text x="14" y="{y - 3:.1f}">{heading}</text>'
        x = frame.left
        for name, value in values:
            width = value / self.most * (frame.right - frame.left)
            shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="14"'
            about = f"<title>{text(name)}: {text(self.show(value))}</title>"
            yield f'<rect class="a p{self.style_of[name]}" {shape}>{about}</rect>'
            x += width
        if self.spans:
            yield from _span(frame, y, self.spans[row], self.shown_unit)


def _span(frame: Frame, y: float, span: Span, shown_unit: float) -> Iterator[str]:
    """Draw the middle half of a bar's measurements as a whisker, and each measurement as a point
    below.
    """
    low, high, points = span
    yield _whisker(frame.x(low / shown_unit), frame.x(high / shown_unit), y + 7)
    for value in points:
        yield _POINT.format(f"{frame.x(value / shown_unit):.1f}", f"{y + 17:.1f}")


def bar_text(label: str, values: Sequence[tuple[str, float]], show: Callable[[float], str]) -> str:
    return f"{label}: " + ", ".join(f"{name} {show(value)}" for name, value in values)


_POINT: Final = '<circle class="m2" cx="{}" cy="{}" r="1.6"/>'


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path class="w" d="M{low:.1f} {y:.1f}H{high:.1f}M{low:.1f} {y - 3:.1f}v6M{high:.1f} '
        f'{y - 3:.1f}v6"/>'
    )


def _shares(
    name: str, bars: Sequence[Bar], sums: Sequence[float], show: Callable[[float], str]
) -> list[str]:
    """Return the row of a part: its name, and in each bar its value and share."""
    row = [name]
    for (_, parts), total in zip(bars, sums, strict=True):
        value = dict(parts).get(name)
        if value is None:
            row.append("")
        else:
            row.append(f"{show(value)} ({value / (total or 1):.1%})")
    return row
