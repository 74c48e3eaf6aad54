"""Charts as SVG, drawn without a package: lines over steps, areas, stacked bars.

A chart is one ``<svg role="img">`` with a title and a description, its size in its view box;
colours are CSS variables, so that the page, or the style of a file of its own, decides light or
dark. No colour stands alone: lines of a chart differ in dashes as well, parts of a bar are named
with their figure, and every chart has its table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import ClassVar, Final

from framework.report.figures import number
from framework.report.series import Series
from framework.system.output import visible

# Six colours each, found by search: in a simulation of each kind of colour blindness any two differ
# by 25 in CIELAB; on their paper each has at least three times its contrast. After six lines they
# come again with other dashes.
LIGHT: Final = ("#0b63b0", "#b7456b", "#090a32", "#997815", "#5519c0", "#770409")
DARK: Final = ("#6cb2f5", "#e44087", "#dcdf08", "#62860c", "#a345f5", "#ace28d")
# Okabe and Ito's, for the parts of a bar: they touch, and a line of paper divides them.
PARTS: Final = (
    "#e69f00",
    "#f0e442",
    "#56b4e9",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#999999",
)
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "9 2 2 2 2 2")
STYLES: Final = 24


def _variables(prefix: str, colors: Sequence[str]) -> str:
    return "".join(f"--{prefix}{number}:{color};" for number, color in enumerate(colors))


def _class_styles(number: int) -> str:
    """Return the CSS of a line, of its marks and of a part of a bar."""
    color = number % 6
    dashes = _DASHES[(number + number // 6) % 8] or "none"
    return (
        f".chart .l{number}{{stroke:var(--l{color});stroke-dasharray:{dashes}}}"
        f".chart .m{number}{{fill:var(--l{color})}}.chart .p{number}{{fill:var(--p{number % 8})}}"
    )


STYLE: Final = (
    ":root{--paper:#fff;--ink:#1b1f24;--soft:#57606a;--grid:#d8dee4;"
    + _variables("l", LIGHT)
    + _variables("p", PARTS)
    + "}@media screen and "
    "(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--soft:#a2abb5;"
    + "--grid:#343a42;"
    + _variables("l", DARK)
    + "}}.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}.chart "
    "text.t{font-size:13px;font-weight:600;fill:var(--ink)}.chart "
    ".g{stroke:var(--grid);fill:none}.chart "
    ".l{fill:none;stroke-width:1.6;stroke-linejoin:round}.chart "
    ".a{stroke:var(--paper);stroke-width:.7}.chart .w,.chart "
    ".r{stroke:var(--ink);fill:none}.chart .r{stroke-dasharray:3 3}"
    + "".join(_class_styles(number) for number in range(STYLES))
)
# A part has the same colour in every chart; parts that are not listed take the next one.
_STYLE_OF_PART: Final = {
    "waiting for data": 0,
    "copy to device": 1,
    "steps taken again": 1,
    "hanging": 1,
    "compiling": 2,
    "forward": 2,
    "evaluation": 2,
    "backward": 3,
    "training": 3,
    "median": 3,
    "communication": 4,
    "between restarts": 4,
    "rolling back": 4,
    "stopped": 7,
    "optimizer": 5,
    "start-up": 5,
    "bubble": 6,
    "saving": 6,
    "callbacks": 6,
    "ending": 0,
    "other": 7,
    "not timed in parts": 7,
}
_CHARACTER: Final = 6.1  # width of a mean character of the font, in its 11 pixels
_LONGEST_NAME: Final = 34
_MOST_MARKS: Final = 150
_MOST_ROWS: Final = 40


def text(value: object) -> str:
    """Escape a text of unknown origin for HTML and SVG; control characters are made visible."""
    return escape(visible(str(value), keeps=""))


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


@dataclass(frozen=True)
class Chart:
    """A drawn chart.

    Attributes:
        slug: name of its file.
        title: what it shows.
        svg: the element, for a page that has the style.
        columns, rows: its table.
        wide: a second drawing for wide screens; empty if one size is enough.
        note: line below its table.
    """

    slug: str
    title: str
    svg: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wide: str = ""
    note: str = ""

    MARK: ClassVar = b'fill="var(--paper)"'
    """In every file of a chart."""

    def file(self) -> str:
        """Return the chart as an SVG file that stands alone, in light and dark."""
        opening, _, rest = (self.wide or self.svg).partition(">")
        paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
        return (
            '<?xml version="1.0" '
            f'encoding="UTF-8"?>\n{opening}><style>{STYLE}</style>{paper}{rest}\n'
        )


@dataclass
class _Frame:
    """Area inside the axes, in pixels, and what its edges mean."""

    left: float
    top: float
    right: float
    bottom: float
    first: float
    last: float
    low: float
    high: float
    is_log: bool = False

    def x(self, step: float) -> float:
        """Return the pixel across of a step."""
        share = (step - self.first) / ((self.last - self.first) or 1)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the pixel down of a value."""
        low = self.low
        high = self.high
        if self.is_log:
            low = math.log10(low)
            high = math.log10(high)
            value = math.log10(max(value, 1e-300))
        share = (value - low) / ((high - low) or 1)
        return self.bottom - share * (self.bottom - self.top)


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
    """Return the least and largest value of each column, and the ends of the series; of a column
    without a number one point, which is a gap.
    """
    steps = series.steps
    values = series.values
    kept = Series()
    begin = 0
    for column in range(columns):
        bound = steps[0] + (steps[-1] - steps[0]) * (column + 1) / columns
        end = len(steps)
        if column + 1 < columns:
            end = bisect_left(steps, bound, begin)
        finite = [index for index in range(begin, end) if math.isfinite(values[index])]
        chosen = set[int]()
        if finite:
            chosen.add(min(finite, key=values.__getitem__))
            chosen.add(max(finite, key=values.__getitem__))
            if column == 0:
                chosen.add(begin)
            elif end == len(steps):
                chosen.add(end - 1)
        elif begin < end:
            chosen.add(begin)
        for index in sorted(chosen):
            kept.steps.append(steps[index])
            kept.values.append(values[index])
        begin = end
    return kept


def ticks(low: float, high: float, *, most: int = 5, is_log: bool = False) -> list[float]:
    """Return about `most` round values from a low to a high one."""
    if is_log:
        return _powers_of_ten(low, high, most)
    if not high > low:
        return [low]
    stride = _round_stride((high - low) / most)
    first = math.ceil(low / stride - 1e-9)
    last = math.floor(high / stride + 1e-9)
    return [index * stride for index in range(first, min(last, first + 2 * most) + 1)]


def _powers_of_ten(low: float, high: float, most: int) -> list[float]:
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    stride = max(1, -(-(last - first + 1) // most))
    powers = [10.0**power for power in range(first, last + 1, stride)]
    if len(powers) > 1:
        return powers
    if low < high:
        return [low, *powers, high]
    return [low]


def _round_stride(rough: float) -> float:
    """Return the first of 1, 2, 5 and 10 times a power of ten that is no less than a stride."""
    unit = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5):
        if unit * factor >= rough * 0.999:
            return unit * factor
    return unit * 10


def tick(value: float) -> str:
    """Return the text of a tick: short, with a prefix of the SI if it is large."""
    for limit, divisor, letter in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1000, "k"),
    ):
        if abs(value) >= limit:
            return f"{value / divisor:.4g}{letter}"
    if abs(value) < 1e-300:
        value = 0.0
    return f"{value:.4g}"


# Name of the axis below, and the function that writes its ticks.
_Across = tuple[str, Callable[[float], str]]
_STEPS: Final[_Across] = ("optimizer step", tick)


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
    across: _Across = _STEPS,
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
    """
    shown = []
    values = []
    for line in lines:
        if line.series.finite:
            shown.append(line)
            values += line.series.finite_values
    if not values:
        return None
    low = min(values)
    high = max(values)
    if reference:
        low = min(low, reference[1])
        high = max(high, reference[1])
    if is_log is None:
        is_log = low > 0 and high > 30 * low
    if from_zero and not is_log:
        low = min(0.0, low)
    axis = f"{unit} (log scale)" if is_log else unit
    ends = []
    for line in shown[:8]:
        ends.append(f"{line.label}: {number(line.series.finite[-1][1])} at the end")
    described = (
        f"{axis} over {across[0]}s; from {number(low)} to {number(high)}. {', '.join(ends)}."
    )
    drawing = _LineDrawing(
        slug, title, axis, described, shown, low, high, is_log, marks, reference, across
    )
    columns, rows, note = _table(shown)
    wide = drawing.svg(980, 340) if has_wide else ""
    return Chart(slug, title, drawing.svg(400, 250), columns, rows, wide, note)


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
    across: _Across

    def svg(self, width: float, height: float) -> str:
        legend, top = _legend(self._legend_entries(), width)
        low, high = self._bounds()
        heights = ticks(low, high, is_log=self.is_log)
        left = _left_of(heights)
        first = min(line.series.steps[0] for line in self.lines)
        last = max(line.series.steps[-1] for line in self.lines)
        frame = _Frame(left, top + 18, width - 14, height - 36, first, last, low, high, self.is_log)
        parts = [legend, _axes(frame, heights, self.axis, top, self.across)]
        columns = max(40, min(int(frame.right - frame.left), 2400 // len(self.lines)))
        for line in self.lines:
            parts.append(_curve(line, frame, columns))
        if self.reference:
            y = frame.y(self.reference[1])
            parts.append(f'<path class="r" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        parts += self._drawn_marks(frame)
        return _svg(self.slug, self.title, self.described, (width, height), parts)

    @property
    def _kinds(self) -> list[str]:
        """Kinds of marks, in the order in which they come first."""
        return list(dict.fromkeys(mark.kind for mark in self.marks))

    def _legend_entries(self) -> list[tuple[str, str]]:
        entries = []
        if len(self.lines) > 1 or self.marks or self.reference:
            for line in self.lines:
                dot = _dot(10, 0, line) if line.shows_points else ""
                stroke = f'<path class="l l{line.style % STYLES}" d="M0 0h20"/>'
                entries.append((line.label, stroke + dot))
        for kind in self._kinds:
            name, shape = _MARKS[kind]
            down = 4 if kind == "save" else -4
            entries.append((name, f'<path {shape} transform="translate(10,{down})"/>'))
        if self.reference:
            name, value = self.reference
            entries.append((f"{name}: {number(value)}", _REFERENCE))
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
        return low - pad, high + pad

    def _drawn_marks(self, frame: _Frame) -> Iterator[str]:
        for kind in self._kinds:
            steps = set()
            for mark in self.marks:
                if mark.kind == kind and frame.first <= mark.step <= frame.last:
                    steps.add(mark.step)
            stride = -(-len(steps) // _MOST_MARKS) or 1
            y = frame.bottom if kind == "save" else frame.top
            for step in sorted(steps)[::stride]:
                place = f"translate({frame.x(step):.1f},{y:.1f})"
                yield f'<path {_MARKS[kind][1]} transform="{place}"/>'


_REFERENCE: Final = '<path class="r" d="M0 0h20"/>'


def _left_of(heights: Sequence[float]) -> float:
    """Return the left edge of a frame: room for the ticks of its upright axis."""
    return 14 + _CHARACTER * max(len(tick(value)) for value in heights)


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


def _curve(line: Line, frame: _Frame, columns: int) -> str:
    pieces = thin(line.series, columns)
    strokes = []
    dots = []
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
        strokes.append(stroke)
    if not line.shows_points or len(dots) > 60:
        dots = []
    return f'<path class="l l{line.style % STYLES}" d="{"".join(strokes)}"/>{"".join(dots)}'


def _dot(x: float, y: float, line: Line) -> str:
    return f'<circle class="m{line.style % STYLES}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def _axes(
    frame: _Frame, heights: Sequence[float], axis: str, top: float, across: _Across = _STEPS
) -> str:
    parts = [f'<text x="6" y="{top + 9:.1f}">{text(axis)}</text>']
    for value in heights:
        y = frame.y(value)
        parts.append(f'<path class="g" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        parts.append(
            f'<text x="{frame.left - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick(value)}</text>'
        )
    for value in ticks(frame.first, frame.last):
        if value == int(value):
            x = frame.x(value)
            parts.append(f'<path class="g" d="M{x:.1f} {frame.bottom:.1f}v4"/>')
            parts.append(_below(frame, x, across[1](value)))
    middle = (frame.left + frame.right) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{frame.bottom + 31:.1f}" '
        f'text-anchor="middle">{across[0]}</text>'
    )
    return "".join(parts)


def _below(frame: _Frame, x: float, label: str) -> str:
    return f'<text x="{x:.1f}" y="{frame.bottom + 16:.1f}" text-anchor="middle">{label}</text>'


def _legend(entries: Sequence[tuple[str, str]], width: float) -> tuple[str, float]:
    """Return the legend below the title, and where it ends."""
    x = 6.0
    y = 38.0
    parts = []
    for label, symbol in entries:
        name = _cut(label, _LONGEST_NAME)
        needed = 36 + _CHARACTER * len(visible(name, keeps=""))
        if x > 6 and x + needed > width:
            x = 6.0
            y += 16
        parts.append(
            f'<g transform="translate({x:.1f},{y - 4:.1f})">{symbol}<text x="25" '
            f'y="4">{text(name)}</text></g>'
        )
        x += needed
    bottom = y + 8 if entries else 28.0
    return "".join(parts), bottom


def _cut(label: str, longest: int) -> str:
    if len(label) <= longest:
        return label
    return label[: longest - 3] + "..."


def _svg(
    slug: str, title: str, described: str, size: tuple[float, float], parts: Sequence[str]
) -> str:
    width, height = size
    name = f"{slug}-{width:.0f}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{text(title)}</title>'
        f'<desc id="{name}-d">{text(described)}</desc>'
        f'<text class="t" x="6" y="18">{text(title)}</text>'
        f"{''.join(parts)}</svg>"
    )


def _table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]], str]:
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


Bar = tuple[str, Sequence[tuple[str, float]]]
"""Label, and parts with their values."""


def bar_chart(
    slug: str,
    title: str,
    unit: str,
    bars: Sequence[Bar],
    *,
    show: Callable[[float], str] = number,
    shown_unit: float = 1.0,
    spans: Sequence[tuple[float, float, Sequence[float]]] = (),
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
        descriptions.append(_bar_text(label, values, show))
        total = 0.0
        for name, value in values:
            names[name] = None
            total += value
        sums.append(total)
    most = max([0.0, *sums])
    for _, high, points in spans:
        most = max(most, high, *points)
    if limit:
        most = max(most, limit[1])
    if not most > 0:
        return None
    style_of = _part_styles(list(names))
    single = dict(bars[0][1]) if len(bars) == 1 and not spans else {}
    entries = []
    for name, style in style_of.items():
        label = name
        if name in single:
            label = f"{name} {show(single[name])} ({single[name] / most:.0%})"
        entries.append((label, _swatch(style)))
    if spans:
        entries.append(("middle half", _whisker(0, 18, 0)))
        entries.append(("one measurement", _POINT.format(9, 0)))
    if limit:
        entries.append((limit[0], _REFERENCE))
    legend, top = _legend(entries, 400)
    height = top + 34 * len(bars) + 40
    frame = _Frame(14, top, 386, height - 36, 0, most / shown_unit, 0, 1)
    parts = [legend]
    parts += _upright_lines(frame)
    parts.append(f'<text x="200" y="{height - 5:.1f}" text-anchor="middle">{text(unit)}</text>')
    for row, (label, values) in enumerate(bars):
        y = top + 34 * row + 14
        heading = f"{text(_cut(label, 44))}: {text(show(sums[row]))}"
        parts.append(f'<text x="14" y="{y - 3:.1f}">{heading}</text>')
        parts += _bar(frame, y, values, most, style_of, show)
        if spans:
            parts += _span(frame, y, spans[row], shown_unit)
    if limit:
        x = frame.x(limit[1] / shown_unit)
        parts.append(f'<path class="r" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>')
    svg = _svg(slug, title, "; ".join(descriptions[:8]), (400, height), parts)
    rows = [_shares(name, bars, sums, show) for name in names]
    return Chart(slug, title, svg, ["part", *labels], rows)


def _bar(
    frame: _Frame,
    y: float,
    values: Sequence[tuple[str, float]],
    most: float,
    style_of: Mapping[str, int],
    show: Callable[[float], str],
) -> Iterator[str]:
    x = frame.left
    for name, value in values:
        width = value / most * (frame.right - frame.left)
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="14"'
        about = f"<title>{text(name)}: {text(show(value))}</title>"
        yield f'<rect class="a p{style_of[name]}" {shape}>{about}</rect>'
        x += width


def _span(
    frame: _Frame, y: float, span: tuple[float, float, Sequence[float]], shown_unit: float
) -> Iterator[str]:
    low, high, points = span
    yield _whisker(frame.x(low / shown_unit), frame.x(high / shown_unit), y + 7)
    for value in points:
        yield _POINT.format(f"{frame.x(value / shown_unit):.1f}", f"{y + 17:.1f}")


def _part_styles(names: Sequence[str]) -> dict[str, int]:
    return {name: _STYLE_OF_PART.get(name, place % 8) for place, name in enumerate(names)}


def _bar_text(label: str, values: Sequence[tuple[str, float]], show: Callable[[float], str]) -> str:
    return f"{label}: " + ", ".join(f"{name} {show(value)}" for name, value in values)


def _upright_lines(frame: _Frame) -> Iterator[str]:
    """Draw the ticks of bars: lines through the frame, with their values below."""
    for value in ticks(frame.first, frame.last):
        x = frame.x(value)
        yield f'<path class="g" d="M{x:.1f} {frame.top:.1f}V{frame.bottom + 4:.1f}"/>'
        yield _below(frame, x, tick(value))


_POINT: Final = '<circle class="m2" cx="{}" cy="{}" r="1.6"/>'


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path class="w" d="M{low:.1f} {y:.1f}H{high:.1f}M{low:.1f} {y - 3:.1f}v6M{high:.1f} '
        f'{y - 3:.1f}v6"/>'
    )


def _swatch(style: int) -> str:
    return f'<rect class="a p{style}" y="-5" width="18" height="10"/>'


def _swatches(style_of: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(name, _swatch(style)) for name, style in style_of.items()]


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


def area_chart(
    slug: str, title: str, unit: str, parts: Sequence[tuple[str, Series]]
) -> Chart | None:
    """Draw parts stacked over steps, which are the same for all; None if there are fewer than two
    points.
    """
    if not parts or len(parts[0][1].steps) < 2:
        return None
    names = []
    all_series = []
    lines = []
    for name, series in parts:
        names.append(name)
        all_series.append(series)
        lines.append(Line(name, series))
    columns = list(_area_columns(all_series, 180))
    most = max(sum(column.values) for column in columns)
    if not most > 0:
        return None
    style_of = _part_styles(names)
    legend, top = _legend(_swatches(style_of), 400)
    size = (400.0, top + 212)
    heights = ticks(0, most * 1.04)
    frame = _Frame(
        _left_of(heights),
        top + 18,
        386,
        size[1] - 36,
        columns[0].first,
        columns[-1].last,
        0,
        most * 1.04,
    )
    drawn = [legend, _axes(frame, heights, unit, top)]
    below = [0.0 for _ in columns]
    for index, style in enumerate(style_of.values()):
        upper = []
        lower = []
        for place, column in enumerate(columns):
            above = below[place] + column.values[index]
            for step in (column.first, column.last):
                upper.append(f"{frame.x(step):.1f} {frame.y(above):.1f}")
                lower.append(f"{frame.x(step):.1f} {frame.y(below[place]):.1f}")
            below[place] = above
        outline = "L".join(upper + lower[::-1])
        drawn.append(f'<path class="a p{style}" d="M{outline}z"/>')
    described = f"{unit} by part over optimizer steps, stacked: {', '.join(names)}."
    headings, rows, note = _table(lines)
    svg = _svg(slug, title, described, size, drawn)
    return Chart(slug, title, svg, headings, rows, "", note)


@dataclass(frozen=True)
class _AreaColumn:
    """Some steps of stacked parts: the step that the column before ends with, its own last step,
    and the mean of each part.
    """

    first: int
    last: int
    values: list[float]


def _area_columns(parts: Sequence[Series], most: int) -> Iterator[_AreaColumn]:
    """Divide the steps of series, which are the same for all, into at most `most` columns that
    touch.
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
    """Return the mean of the values that are numbers, at least 0."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0
    return max(0.0, sum(finite) / len(finite))


_INK_ON_PART: Final = {"forward": "#000", "backward": "#fff"}


TimelinePart = tuple[float, float, str, int]
"""Begin and length in ms, name and number."""
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
        descriptions.append(_bar_text(label, list(total.items()), _milliseconds))
    columns = [""]
    columns += [f"{name} (ms)" for name in names]
    described = "; ".join(descriptions[:8])
    style_of = _part_styles(list(names))
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
        legend, top = _legend(_swatches(self.style_of), width)
        height = top + 34 * len(self.rows) + 40
        frame = _Frame(14, top, width - 14, height - 36, 0, self.length, 0, 1)
        drawn = [legend]
        drawn += _upright_lines(frame)
        drawn.append(
            f'<text x="{width / 2:.0f}" y="{height - 5:.1f}" text-anchor="middle">ms</text>'
        )
        for row, (label, row_parts) in enumerate(self.rows):
            y = top + 34 * row + 14
            drawn.append(f'<text x="14" y="{y - 3:.1f}">{text(label)}</text>')
            for at, spent, name, place in row_parts:
                part_width = spent / (self.length or 1) * (frame.right - frame.left)
                drawn += self._part(frame.x(at - self.begin), y, part_width, name, place, spent)
        return _svg(self.slug, self.title, self.described, (width, height), drawn)

    def _part(
        self, x: float, y: float, width: float, name: str, place: int, spent: float
    ) -> Iterator[str]:
        """Draw one part, and its number if there is room."""
        if width >= 0.15:
            shape = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="14"'
            about = f"<title>{text(name)} {place}: {number(spent)} ms</title>"
            yield f'<rect class="p{self.style_of[name]}" {shape}>{about}</rect>'
        ink = _INK_ON_PART.get(name)
        if ink and width >= 4 + _CHARACTER * len(str(place)):
            middle = f'x="{x + width / 2:.1f}" y="{y + 11:.1f}" text-anchor="middle"'
            yield f'<text {middle} style="fill:{ink}">{place}</text>'
