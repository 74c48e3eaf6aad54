"""Charts of a step's parts by their time, a row for each rank or stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from framework.report.bar_chart import bar_text
from framework.report.chart import (
    CHARACTER_WIDTH,
    Chart,
    Frame,
    make_legend,
    svg_element,
    swatches,
    text,
    upright_lines,
)
from framework.report.chart_style import part_styles
from framework.report.figures import number

# Phase with its number in the drawing -> colour of the number.
_INK_ON_PART: Final = {"forward": "#000", "backward": "#fff"}


TimelinePart = tuple[float, float, str, int]
"""Begin and length in ms, name of the phase, and number of the micro-batch."""
_TimelineRow = tuple[str, Sequence[TimelinePart]]


def timeline_chart(slug: str, title: str, rows: Sequence[_TimelineRow]) -> Chart:
    """Draw parts of a step by their time, a row for each rank or stage.

    Args:
        slug, title: name of the file, and of the chart.
        rows: label, and the parts.
    """
    begins = []
    ends = []
    names: dict[str, None] = {}
    for _, parts in rows:
        for begin, length, name, _ in parts:
            begins.append(begin)
            ends.append(begin + length)
            names[name] = None
    begin = min(begins, default=0.0)
    length = max(ends, default=1.0) - begin
    table = []
    descriptions = []
    for label, parts in rows:
        total = dict.fromkeys(names, 0.0)
        for _, part_length, name, _ in parts:
            total[name] += part_length
        table.append([label, *map(number, total.values())])
        descriptions.append(bar_text(label, list(total.items()), _milliseconds))
    columns = [""]
    columns += [f"{name} (ms)" for name in names]
    described = "; ".join(descriptions[:8])
    style_of = part_styles(list(names))
    drawing = _TimelineDrawing(slug, title, described, rows, style_of, begin, length)
    return Chart(slug, title, drawing.svg(400), columns, table, drawing.svg(980))


def _milliseconds(value: float) -> str:
    return f"{number(value)} ms"


@dataclass(frozen=True)
class _TimelineDrawing:
    """What a timeline shows, in any width; see `timeline_chart`."""

    slug: str
    title: str
    described: str
    rows: Sequence[_TimelineRow]
    style_of: Mapping[str, int]
    begin: float
    length: float

    def svg(self, width: float) -> str:
        legend, top = make_legend(swatches(self.style_of), width)
        height = top + 34 * len(self.rows) + 40
        frame = Frame(14, top, width - 14, height - 36, 0, self.length, 0, 1)
        drawn = [legend]
        drawn += upright_lines(frame)
        drawn.append(
            f'<text x="{width / 2:.0f}" y="{height - 5:.1f}" text-anchor="middle">ms</text>'
        )
        for row, (label, row_parts) in enumerate(self.rows):
            y = top + 34 * row + 14
            drawn.append(f'<text x="14" y="{y - 3:.1f}">{text(label)}</text>')
            for at, spent, name, place in row_parts:
                part_width = spent / (self.length or 1) * (frame.right - frame.left)
                drawn += self._part(frame.x(at - self.begin), y, part_width, name, place, spent)
        return svg_element(self.slug, self.title, self.described, (width, height), drawn)

    def _part(
        self, x: float, y: float, width: float, name: str, place: int, spent: float
    ) -> Iterator[str]:
        """Draw one part, and its number if there is room."""
        if width >= 0.15:
            shape = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="14"'
            about = f"<title>{text(name)} {place}: {number(spent)} ms</title>"
            yield f'<rect class="p{self.style_of[name]}" {shape}>{about}</rect>'
        ink = _INK_ON_PART.get(name)
        if ink and width >= 4 + CHARACTER_WIDTH * len(str(place)):
            middle = f'x="{x + width / 2:.1f}" y="{y + 11:.1f}" text-anchor="middle"'
            yield f'<text {middle} style="fill:{ink}">{place}</text>'
