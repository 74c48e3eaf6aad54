"""Charts of lines over steps, or over something else."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from framework.report.chart import (
    OVER_STEPS,
    REFERENCE,
    Across,
    Chart,
    Frame,
    draw_axes,
    left_of_ticks,
    make_legend,
    svg_element,
    text,
    ticks,
)
from framework.report.chart_style import STYLES
from framework.report.figures import number
from framework.report.series import Series

_MOST_MARKS: Final = 150
_MOST_ROWS: Final = 40


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        label: what the legend calls it.
        series: points.
        style: number of its colour and its dashes.
        shows_points: each point is marked as well, for few measurements.
    """

    label: str
    series: Series
    style: int = 0
    shows_points: bool = False


@dataclass(frozen=True)
class Mark:
    """An event at a step; its kind is a key of `_MARKS`, such as ``save``."""

    kind: str
    step: int


def thin(series: Series, columns: int) -> list[list[tuple[int, float]]]:
    """Divide a series into unbroken pieces, with at most two points per column of pixels: its least
    and its largest value, in their order, so that no peak is lost.
    """
    if len(series.steps) > 2 * columns:
        series = _extremes(series, columns)
    pairs = zip(series.steps, series.values, strict=True)
    pieces = []
    for is_number, piece in groupby(pairs, lambda pair: math.isfinite(pair[1])):
        if is_number:
            pieces.append(list(piece))
    return pieces


def _extremes(series: Series, columns: int) -> Series:
    """Return a shorter series: the least and largest point of each of `columns` equal ranges of
    steps, and both ends; one NaN, drawn as a gap, for a range without a finite value.
    """
    steps = series.steps
    kept = Series()
    begin = 0
    for column in range(columns):
        bound = steps[0] + (steps[-1] - steps[0]) * (column + 1) / columns
        end = len(steps)
        if column + 1 < columns:
            end = bisect_left(steps, bound, begin)
        for index in _extremes_of_column(series, begin, end):
            kept.steps.append(steps[index])
            kept.values.append(series.values[index])
        begin = end
    return kept


def _extremes_of_column(series: Series, begin: int, end: int) -> list[int]:
    """Return the indices of the points to keep among those from `begin` to before `end`."""
    values = series.values
    if begin == end:
        return []
    finite = [index for index in range(begin, end) if math.isfinite(values[index])]
    if not finite:
        return [begin]
    chosen = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    if begin == 0:
        chosen.add(begin)
    elif end == len(values):
        chosen.add(end - 1)
    return sorted(chosen)


def line_chart(
    slug: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    marks: Sequence[Mark] = (),
    reference: tuple[str, float] | None = None,
    is_log: bool | None = None,
    has_wide: bool = False,
    from_zero: bool = False,
    across: Across = OVER_STEPS,
    remark: str = "",
) -> Chart | None:
    """Draw values over steps, or over something else; None if no point is a number.

    Args:
        slug, title: name of the file, and of the chart.
        unit: of the values, as the axis names it.
        lines: the curves.
        marks: events at some steps.
        reference: a value to compare with, and its name.
        is_log: a logarithmic axis; left out: if the values, all positive, span more than a factor
            of 30.
        has_wide: also a drawing for wide screens.
        from_zero: the axis begins at 0.
        across: the axis below.
        remark: line below the drawing.
    """
    shown = [line for line in lines if line.series.finite]
    if not shown:
        return None
    low, high = _range(shown, reference)
    if is_log is None:
        is_log = low > 0 and high > 30 * low
    if from_zero and not is_log:
        low = min(0.0, low)
    axis = f"{unit} (log scale)" if is_log else unit
    described = (
        f"{axis} over {across[0]}s; from {number(low)} to {number(high)}. {_ends(shown[:8])}."
    )
    drawing = _LineDrawing(
        slug, title, axis, described, shown, low, high, is_log, marks, reference, across
    )
    return drawing.chart(has_wide=has_wide, remark=remark)


def _range(lines: Sequence[Line], reference: tuple[str, float] | None) -> tuple[float, float]:
    """Return the least and the largest value of lines and reference."""
    values: list[float] = []
    for line in lines:
        values += line.series.finite_values
    if reference:
        values.append(reference[1])
    return min(values), max(values)


def _ends(lines: Sequence[Line]) -> str:
    """Return text with the last value of each line."""
    ends = []
    for line in lines:
        ends.append(f"{line.label}: {number(line.series.finite[-1][1])} at the end")
    return ", ".join(ends)


@dataclass(frozen=True)
class _LineDrawing:
    """What a chart of lines shows, in any size; see `line_chart`."""

    slug: str
    title: str
    axis: str
    described: str
    lines: Sequence[Line]
    low: float
    high: float
    is_log: bool
    marks: Sequence[Mark]
    reference: tuple[str, float] | None
    across: Across

    def chart(self, *, has_wide: bool, remark: str) -> Chart:
        """Return the drawings with their table."""
        columns, rows, note = series_table(self.lines)
        wide = self.svg(980, 340) if has_wide else ""
        narrow = self.svg(400, 250)
        return Chart(self.slug, self.title, narrow, columns, rows, wide, note, remark)

    def svg(self, width: float, height: float) -> str:
        legend, top = make_legend(self._legend_entries(), width)
        low, high = self._bounds()
        heights = ticks(low, high, is_log=self.is_log)
        left = left_of_ticks(heights)
        first, last = self._ends_across()
        # The highest tick stands below the name of the axis.
        frame = Frame(left, top + 26, width - 14, height - 36, first, last, low, high, self.is_log)
        parts = [legend, draw_axes(frame, heights, self.axis, top, self.across)]
        columns = max(40, min(int(frame.right - frame.left), 2400 // len(self.lines)))
        for line in self.lines:
            parts.append(_curve(line, frame, columns))
        if self.reference:
            y = frame.y(self.reference[1])
            parts.append(f'<path class="r" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        parts += self._drawn_marks(frame)
        parts += hover_strips(self.lines, frame, most=int(width / 8), across=self.across)
        return svg_element(self.slug, self.title, self.described, (width, height), parts)

    def _ends_across(self) -> tuple[float, float]:
        """Return the ends of the axis below: the first and the last step; 0 for a first step that
        is near it, so that a run which starts afresh begins at the axis.
        """
        first = min(line.series.steps[0] for line in self.lines)
        last = max(line.series.steps[-1] for line in self.lines)
        if self.across is OVER_STEPS and 0 < first <= 0.25 * last:
            first = 0
        return first, last

    @property
    def _kinds(self) -> list[str]:
        """Kinds of marks, in the order in which they come first."""
        return list(dict.fromkeys(mark.kind for mark in self.marks))

    def _legend_entries(self) -> list[tuple[str, str]]:
        entries = []
        if len(self.lines) > 1 or self.marks or self.reference:
            entries += [(line.label, _sample(line)) for line in self.lines]
        for kind in self._kinds:
            name, shape = _MARKS[kind]
            down = 4 if kind == "save" else -4
            entries.append((name, f'<path {shape} transform="translate(10,{down})"/>'))
        if self.reference:
            name, value = self.reference
            entries.append((f"{name}: {number(value)}", REFERENCE))
        return entries

    def _bounds(self) -> tuple[float, float]:
        """Return the values at the lower and upper edge, with room beyond the curves."""
        low = self.low
        high = self.high
        if self.is_log:
            if low < high:
                return low, high
            return low * 0.9, high * 1.1
        pad = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        if low == 0 and high > 0:
            return low, high + pad
        if 0 < low < pad + 0.3 * high:
            return 0.0, high + pad  # near enough to 0 to show how near
        return low - pad, high + pad

    def _drawn_marks(self, frame: Frame) -> Iterator[str]:
        """Yield the marks: saves at the lower edge of the frame, others at the upper one."""
        for kind in self._kinds:
            y = frame.bottom if kind == "save" else frame.top
            for step in self._marked_steps(kind, frame):
                place = f"translate({frame.x(step):.1f},{y:.1f})"
                yield f'<path {_MARKS[kind][1]} transform="{place}"/>'

    def _marked_steps(self, kind: str, frame: Frame) -> Sequence[int]:
        """Return the steps with a mark of this kind inside the frame; of more than `_MOST_MARKS`
        some at even distances.
        """
        steps = set()
        for mark in self.marks:
            if mark.kind == kind and frame.first <= mark.step <= frame.last:
                steps.add(mark.step)
        return sorted(steps)[:: -(-len(steps) // _MOST_MARKS) or 1]


# Marks: name in the legend, and attributes of a path around its place on the upper or lower edge of
# the frame.
_MARKS: Final = {
    "save": ("checkpoint", 'class="m2" d="M0 0l-4 -7h8z"'),
    "skip": ("skipped step", 'class="m1" d="M-1 0h2v9h-2z"'),
    "restart": ("restart", 'class="m3" d="M0 0l5 4l-5 4l-5 -4z"'),
    "back": ("rolled back", 'class="m4" d="M0 4l8 -4v8z"'),
    "nan": (
        "not finite",
        'class="m5" d="M-4 1l1 -1l3 3l3 -3l1 1l-3 3l3 3l-1 1l-3 -3l-3 3l-1 -1l3 -3z"',
    ),
}


def _curve(line: Line, frame: Frame, columns: int) -> str:
    """Draw a line, broken where values are not finite, with a dot at each of at most 60 points if
    `line.shows_points`, and otherwise where a point stands alone.
    """
    pieces = thin(line.series, columns)
    strokes = []
    dots = []
    lone_dots = []
    for piece in pieces:
        points = []
        for step, value in piece:
            x = frame.x(step)
            y = frame.y(value)
            points.append(f"{x:.1f} {y:.1f}")
            dots.append(_dot(x, y, line))
        stroke = "M" + "L".join(points)
        if len(points) == 1:
            stroke += "h.1"
            lone_dots.append(dots[-1])
        strokes.append(stroke)
    if not line.shows_points or len(dots) > 60:
        dots = lone_dots[:60]
    return f'<path class="l l{line.style % STYLES}" d="{"".join(strokes)}"/>{"".join(dots)}'


def hover_strips(
    lines: Sequence[Line], frame: Frame, *, most: int, across: Across
) -> Iterator[str]:
    """Draw upright strips over the frame that show under the pointer what the lines are there: at
    most `most`, each from its last step with a value, as far as the one before.
    """
    steps = set[int]()
    for line in lines:
        steps.update(line.series.steps)
    ordered = sorted(steps)
    stride = -(-len(ordered) // most) or 1
    ends = ordered[::-1][::stride][::-1]
    positions = [0 for _ in lines]
    for place, end in enumerate(ends):
        values = []
        for index, line in enumerate(lines):
            after = bisect_right(line.series.steps, end)
            if after > positions[index]:
                step = line.series.steps[after - 1]
                at = "" if step == end else f" at {across[1](step)}"
                values.append(f"{line.label}: {number(line.series.values[after - 1])}{at}")
                positions[index] = after
        left, right = _sides(ends, place, frame)
        about = "\n".join([f"{across[0]} {across[1](end)}", *values])
        yield (
            f'<rect class="h" x="{left:.1f}" y="{frame.top:.0f}" width="{right - left:.1f}" '
            f'height="{frame.bottom - frame.top:.0f}"><title>{_tooltip(about)}</title></rect>'
        )


def _sides(ends: Sequence[float], place: int, frame: Frame) -> tuple[float, float]:
    """Return left and right of the strip at this place: half way to its neighbours."""
    left = frame.left
    if place:
        left = frame.x((ends[place - 1] + ends[place]) / 2)
    right = frame.right
    if place + 1 < len(ends):
        right = frame.x((ends[place] + ends[place + 1]) / 2)
    return left, right


def _tooltip(words: str) -> str:
    """Escape a text of several lines for the title of an element."""
    return "\n".join(map(text, words.split("\n")))


def _sample(line: Line) -> str:
    """Return a line as the legend shows it."""
    dot = _dot(10, 0, line) if line.shows_points else ""
    return f'<path class="l l{line.style % STYLES}" d="M0 0h20"/>' + dot


def _dot(x: float, y: float, line: Line) -> str:
    return f'<circle class="m{line.style % STYLES}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def series_table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]], str]:
    """Return columns, rows and a note: at most `_MOST_ROWS` steps and the first, evenly chosen from
    all that any line has.
    """
    columns = ["step"]
    all_steps = set[int]()
    value_at = []
    for line in lines:
        columns.append(line.label)
        all_steps.update(line.series.steps)
        value_at.append(dict(zip(line.series.steps, line.series.values, strict=True)))
    steps = sorted(all_steps)
    stride = -(-len(steps) // _MOST_ROWS) or 1
    chosen = set(steps[::-1][::stride])
    chosen.add(steps[0])
    rows = []
    for step in sorted(chosen):
        row = [f"{step:,}"]
        for values in value_at:
            row.append(number(values[step]) if step in values else "")
        rows.append(row)
    note = ""
    if stride > 1:
        note = f"{len(chosen)} of {len(steps):,} steps; metrics.jsonl has all"
    return columns, rows, note
