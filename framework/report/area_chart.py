"""Charts of parts that are stacked over steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from framework.report.chart import (
    Chart,
    Frame,
    draw_axes,
    left_of_ticks,
    make_legend,
    svg_element,
    swatches,
    ticks,
)
from framework.report.chart_style import part_styles
from framework.report.line_chart import Line, series_table
from framework.report.series import Series


def area_chart(
    slug: str, title: str, unit: str, parts: Sequence[tuple[str, Series]]
) -> Chart | None:
    """Draw parts stacked over steps; None if there are fewer than two points or no value above 0.
    All parts must have the same steps.
    """
    if not parts or len(parts[0][1].steps) < 2:
        return None
    names = [name for name, _ in parts]
    columns = list(_area_columns([series for _, series in parts], 180))
    most = max(sum(column.values) for column in columns)
    if not most > 0:
        return None
    style_of = part_styles(names)
    legend, top = make_legend(swatches(style_of), 400)
    size = (400.0, top + 212)
    heights = ticks(0, most * 1.04)
    frame = Frame(
        left_of_ticks(heights),
        top + 18,
        386,
        size[1] - 36,
        columns[0].first,
        columns[-1].last,
        0,
        most * 1.04,
    )
    drawn = [legend, draw_axes(frame, heights, unit, top)]
    drawn += _areas(frame, columns, list(style_of.values()))
    described = f"{unit} by part over optimizer steps, stacked: {', '.join(names)}."
    headings, rows, note = series_table([Line(name, series) for name, series in parts])
    svg = svg_element(slug, title, described, size, drawn)
    return Chart(slug, title, svg, headings, rows, "", note)


def _areas(frame: Frame, columns: Sequence[_AreaColumn], styles: Sequence[int]) -> Iterator[str]:
    """Yield an SVG path for each part, stacked on the parts before it; `styles` are the numbers of
    their colours.
    """
    below = [0.0 for _ in columns]
    for index, style in enumerate(styles):
        upper = []
        lower = []
        for place, column in enumerate(columns):
            above = below[place] + column.values[index]
            for step in (column.first, column.last):
                upper.append(f"{frame.x(step):.1f} {frame.y(above):.1f}")
                lower.append(f"{frame.x(step):.1f} {frame.y(below[place]):.1f}")
            below[place] = above
        outline = "L".join(upper + lower[::-1])
        yield f'<path class="a p{style}" d="M{outline}z"/>'


@dataclass(frozen=True)
class _AreaColumn:
    """Some steps of stacked parts: the step that the column before ends with, its own last step,
    and the mean of each part.
    """

    first: int
    last: int
    values: list[float]


def _area_columns(parts: Sequence[Series], most: int) -> Iterator[_AreaColumn]:
    """Divide the steps of the parts, which are the same for all, into at most `most` columns, each
    with the means of its steps; a column begins where the one before ends.
    """
    steps = parts[0].steps
    stride = -(-len(steps) // most)
    begin = 0
    for start in range(0, len(steps), stride):
        end = steps[min(start + stride, len(steps)) - 1]
        means = [_mean(series.values[start : start + stride]) for series in parts]
        yield _AreaColumn(begin, end, means)
        begin = end


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, at least 0; 0 without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0
    return max(0.0, sum(finite) / len(finite))
