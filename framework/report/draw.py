"""Charts as SVG, drawn without a package: lines over steps, areas, stacked bars.

A chart is one ``<svg role="img">`` with a title and a description, its size in its view box;
colours are CSS variables, so that the page, or the style of a file of its own, decides light or
dark. No colour stands alone: lines of a chart differ in dashes as well, parts of a bar are named
with their figure, and every chart has its table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import ClassVar, Final

from framework.report.figures import number
from framework.report.series import Series
from framework.system.output import visible

# Six colours each, found by search: whichever kind of colour blindness is simulated, any two differ
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
STYLE: Final = (
    ":root{--paper:#fff;--ink:#1b1f24;--soft:#57606a;--grid:#d8dee4;"
    + "".join(f"--l{n}:{color};" for n, color in enumerate(LIGHT))
    + "".join(f"--p{n}:{color};" for n, color in enumerate(PARTS))
    + "}@media screen and "
    "(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--soft:#a2abb5;"
    + "--grid:#343a42;"
    + "".join(f"--l{n}:{color};" for n, color in enumerate(DARK))
    + "}}.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}.chart "
    "text.t{font-size:13px;font-weight:600;fill:var(--ink)}.chart "
    ".g{stroke:var(--grid);fill:none}.chart "
    ".l{fill:none;stroke-width:1.6;stroke-linejoin:round}.chart "
    ".a{stroke:var(--paper);stroke-width:.7}.chart .w,.chart "
    ".r{stroke:var(--ink);fill:none}.chart .r{stroke-dasharray:3 3}"
    + "".join(
        f".chart .l{n}{{stroke:var(--l{n % 6});stroke-dasharray:{_DASHES[(n + n // 6) % 8] or 'none'}}}"
        f".chart .m{n}{{fill:var(--l{n % 6})}}.chart .p{n}{{fill:var(--p{n % 8})}}"
        for n in range(STYLES)
    )
)
# The same part has the same colour wherever it is drawn; others take the next one.
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
    """Escape a text of unknown origin for HTML and SVG, with what would steer the page made
    visible.
    """
    return escape(visible(str(value), keeps=""))


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        label: what the legend calls it.
        series: points.
        style: number of its colour and its dashes.
        shows_points: each point is marked as well, as of few measurements.
    """

    label: str
    series: Series
    style: int = 0
    shows_points: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: ``save``, ``skip`` or ``restart``."""

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
        wide: a second drawing for wide screens; empty where one size is enough.
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
        """The chart as an SVG file that stands alone, in light and dark."""
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
        return self.left + (step - self.first) / ((self.last - self.first) or 1) * (
            self.right - self.left
        )

    def y(self, value: float) -> float:
        low, high = (
            (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        )
        if self.is_log:
            value = math.log10(max(value, 1e-300))
        else:
            value = value
        return self.bottom - (value - low) / ((high - low) or 1) * (self.bottom - self.top)


def thin(series: Series, columns: int) -> list[list[tuple[int, float]]]:
    """Divide a series into unbroken pieces, with at most two points per column of pixels: its least
    and its largest value, in their order, so that no peak is lost.
    """
    if len(series.steps) > 2 * columns:
        series = _extremes(series, columns)
    pairs = zip(series.steps, series.values, strict=True)
    return [
        list(piece)
        for is_number, piece in groupby(pairs, lambda pair: math.isfinite(pair[1]))
        if is_number
    ]


def _extremes(series: Series, columns: int) -> Series:
    steps = series.steps
    values = series.values
    kept = Series()
    begin = 0
    first = steps[0]
    last = steps[-1]
    for column in range(columns):
        bound = first + (last - first) * (column + 1) / columns
        if column + 1 == columns:
            end = len(steps)
        else:
            end = bisect_left(steps, bound, begin)
        here = range(begin, end)
        finite = [index for index in here if math.isfinite(values[index])]
        if finite:
            chosen = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            chosen |= {here[0]} if not column else {here[-1]} if end == len(steps) else set()
        else:
            chosen = set(here[:1])  # a gap
        for index in sorted(chosen):
            kept.steps.append(steps[index])
            kept.values.append(values[index])
        begin = end
    return kept


def ticks(low: float, high: float, *, most: int = 5, is_log: bool = False) -> list[float]:
    """Round values between two others, at most so many."""
    if is_log:
        first = math.ceil(math.log10(low) - 1e-9)
        last = math.floor(math.log10(high) + 1e-9)
        stride = max(1, -(-(last - first + 1) // most))
        powers = [10.0**power for power in range(first, last + 1, stride)]
        if len(powers) > 1:
            return powers
        return [low, *powers, high] if low < high else [low]
    if not high > low:
        return [low]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    stride_ = next(
        (unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999), unit * 10
    )
    first = math.ceil(low / stride_ - 1e-9)
    last = math.floor(high / stride_ + 1e-9)
    return [index * stride_ for index in range(first, min(last, first + 2 * most) + 1)]


def tick(value: float) -> str:
    """Text of a tick: short, with a prefix of the SI where it is large."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1000 if letter == 'k' else limit):.4g}{letter}"
    return f"{0.0 if abs(value) < 1e-300 else value:.4g}"


# name of the axis below, and text of a whole number on it
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
    """Draw values over steps, or over something else; None where no point is a number.

    Args:
        slug, title: name of the file, and of the chart.
        unit: of the values, as the axis names it.
        lines: the curves.
        marks: what happened at some steps.
        reference: a value to compare with, and its name.
        is_log: a logarithmic axis; left out: where the values, all positive, span more than a
            factor of 30.
        has_wide: also a drawing for wide screens.
        from_zero: the axis begins at 0.
        across: the axis below.
    """
    values = [value for line in lines for _, value in line.series.finite]
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
    if is_log:
        axis = f"{unit} (log scale)"
    else:
        axis = unit
    shown = [line for line in lines if line.series.finite]
    counts = ", ".join(
        f"{line.label}: {number(line.series.finite[-1][1])} at the end" for line in shown[:8]
    )
    described = f"{axis} over {across[0]}s; from {number(low)} to {number(high)}. {counts}."

    def drawn(width: float, height: float) -> str:
        return _lines_svg(
            slug,
            title,
            axis,
            described,
            shown,
            (low, high, is_log),
            marks,
            reference,
            (width, height),
            across,
        )

    columns, rows, note = _table(shown)
    if has_wide:
        wide = drawn(980, 340)
    else:
        wide = ""
    return Chart(slug, title, drawn(400, 250), columns, rows, wide, note)


def _lines_svg(
    slug: str,
    title: str,
    axis: str,
    described: str,
    lines: Sequence[Line],
    span: tuple[float, float, bool],
    marks: Sequence[Mark],
    reference: tuple[str, float] | None,
    size: tuple[float, float],
    across: _Across,
) -> str:
    low, high, is_log = span
    first = min(line.series.steps[0] for line in lines)
    last = max(line.series.steps[-1] for line in lines)
    entries = [
        (
            line.label,
            f'<path class="l l{line.style % STYLES}" d="M0 '
            f'0h20"/>{_dot(10, 0, line) if line.shows_points else ""}',
        )
        for line in lines
    ]
    if len(lines) > 1 or marks or reference:
        entries = entries
    else:
        entries = []
    kinds = dict.fromkeys(mark.kind for mark in marks)
    entries += [
        (
            _MARKS[kind][0],
            f'<path {_MARKS[kind][1]} transform="translate(10,{4 if kind == "save" else -4})"/>',
        )
        for kind in kinds
    ]
    if reference:
        entries.append((f"{reference[0]}: {number(reference[1])}", '<path class="r" d="M0 0h20"/>'))
    legend, top = _legend(entries, size[0])
    if is_log:
        pad = 0.0
    else:
        pad = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = (low, high) if low < high else (low * 0.9, high * 1.1) if is_log else (low, high)
    bottom_value = low if is_log or (low == 0 and high > 0) else low - pad
    heights = ticks(bottom_value, high + pad, is_log=is_log)
    left = 14 + _CHARACTER * max(len(tick(value)) for value in heights)
    frame = _Frame(
        left, top + 18, size[0] - 14, size[1] - 36, first, last, bottom_value, high + pad, is_log
    )
    parts = [legend, _axes(frame, heights, axis, top, across)]
    columns = max(40, min(int(frame.right - frame.left), 2400 // len(lines)))
    for line in lines:
        parts.append(_curve(line, frame, columns))
    if reference:
        y = frame.y(reference[1])
        parts.append(f'<path class="r" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
    for kind in kinds:
        steps = sorted(
            {mark.step for mark in marks if mark.kind == kind and first <= mark.step <= last}
        )
        stride = -(-len(steps) // _MOST_MARKS) or 1
        at = frame.bottom if kind == "save" else frame.top
        for step in steps[::stride]:
            parts.append(
                f'<path {_MARKS[kind][1]} transform="translate({frame.x(step):.1f},{at:.1f})"/>'
            )
    return _svg(slug, title, described, size, parts)


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
    drawn = []
    for piece in pieces:
        at = [f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in piece]
        drawn.append("M" + "L".join(at) + ("h.1" if len(at) == 1 else ""))
    few = sum(map(len, pieces)) <= 60
    dots = (
        _dot(frame.x(s), frame.y(v), line)
        for piece in pieces
        for s, v in piece
        if line.shows_points and few
    )
    return f'<path class="l l{line.style % STYLES}" d="{"".join(drawn)}"/>{"".join(dots)}'


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
            parts.append(
                f'<text x="{x:.1f}" y="{frame.bottom + 16:.1f}" '
                f'text-anchor="middle">{across[1](value)}</text>'
            )
    middle = (frame.left + frame.right) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{frame.bottom + 31:.1f}" '
        f'text-anchor="middle">{across[0]}</text>'
    )
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]], width: float) -> tuple[str, float]:
    """Return the legend below the title, and where it ends."""
    x = 6.0
    y = 38.0
    parts = []
    for label, symbol in entries:
        if len(label) <= _LONGEST_NAME:
            name = label
        else:
            name = label[: _LONGEST_NAME - 3] + "..."
        needed = 36 + _CHARACTER * len(visible(name, keeps=""))
        if x > 6 and x + needed > width:
            x = 6.0
            y = y + 16
        parts.append(
            f'<g transform="translate({x:.1f},{y - 4:.1f})">{symbol}<text x="25" '
            f'y="4">{text(name)}</text></g>'
        )
        x += needed
    return "".join(parts), (y + 8 if entries else 28.0)


def _svg(
    slug: str, title: str, described: str, size: tuple[float, float], parts: Sequence[str]
) -> str:
    name = f"{slug}-{size[0]:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{text(title)}</title>'
        f'<desc id="{name}-d">{text(described)}</desc><text class="t" x="6" y="18">{text(title)}</text>'
        f"{''.join(parts)}</svg>"
    )


def _table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]], str]:
    """Columns, rows and a note: at most so many steps, evenly chosen from all that any line has."""
    steps = sorted({step for line in lines for step in line.series.steps})
    stride = -(-len(steps) // _MOST_ROWS) or 1
    chosen = sorted({*steps[::-1][::stride], steps[0]})
    found = [dict(zip(line.series.steps, line.series.values, strict=True)) for line in lines]
    rows = [
        [f"{step:,}", *(number(each[step]) if step in each else "" for each in found)]
        for step in chosen
    ]
    if stride > 1:
        note = f"{len(chosen)} of {len(steps):,} steps; metrics.jsonl has all"
    else:
        note = ""
    return ["step", *(line.label for line in lines)], rows, note


def bar_chart(
    slug: str,
    title: str,
    unit: str,
    bars: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    *,
    show: Callable[[float], str] = number,
    shown_unit: float = 1.0,
    spans: Sequence[tuple[float, float, Sequence[float]]] = (),
    limit: tuple[str, float] | None = None,
) -> Chart | None:
    """Draw horizontal bars of parts; None where there is nothing to draw.

    Args:
        slug, title: name of the file, and of the chart.
        unit: of the values, as the axis names it.
        bars: label, and parts with their values.
        show: text of a value in legend and table.
        shown_unit: what a value is divided by on the axis.
        spans: of each bar the middle half of what was measured, and all of it.
        limit: a value to stay below, and its name.
    """
    names = list(dict.fromkeys(name for _, parts in bars for name, _ in parts))
    sums = [sum(value for _, value in parts) for _, parts in bars]
    most = max(
        [0.0, *sums, limit[1] if limit else 0.0, *(max(high, *points) for _, high, points in spans)]
    )
    if not most > 0:
        return None
    if len(bars) == 1 and not spans:
        single = dict(bars[0][1])
    else:
        single = {}

    def labelled(name: str) -> str:
        if name in single:
            return f"{name} {show(single[name])} ({single[name] / most:.0%})"
        return name

    styles = [_STYLE_OF_PART.get(name, place % 8) for place, name in enumerate(names)]
    entries = [(labelled(name), _swatch(style)) for name, style in zip(names, styles, strict=True)]
    entries += (
        [("middle half", _whisker(0, 18, 0)), ("one measurement", _POINT.format(9, 0))]
        if spans
        else []
    )
    entries += [(limit[0], '<path class="r" d="M0 0h20"/>')] if limit else []
    legend, top = _legend(entries, 400)
    height = top + 34 * len(bars) + 40
    frame = _Frame(14, top, 386, height - 36, 0, most / shown_unit, 0, 1)
    parts = [legend]
    for value in ticks(0, most / shown_unit):
        x = frame.x(value)
        parts.append(f'<path class="g" d="M{x:.1f} {frame.top:.1f}V{frame.bottom + 4:.1f}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{frame.bottom + 16:.1f}" '
            f'text-anchor="middle">{tick(value)}</text>'
        )
    parts.append(f'<text x="200" y="{height - 5:.1f}" text-anchor="middle">{text(unit)}</text>')
    for row, ((label, values), total) in enumerate(zip(bars, sums, strict=True)):
        y = top + 34 * row + 14
        x = frame.left
        if len(label) <= 44:
            short = label
        else:
            short = label[:41] + "..."
        parts.append(f'<text x="14" y="{y - 3:.1f}">{text(short)}: {text(show(total))}</text>')
        for name, value in values:
            width = value / most * (frame.right - frame.left)
            part = (
                f'<rect class="a p{styles[names.index(name)]}" x="{x:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="14">'
            )
            parts.append(f"{part}<title>{text(name)}: {text(show(value))}</title></rect>")
            x += width
        for low, high, points in spans[row : row + 1]:
            parts.append(_whisker(frame.x(low / shown_unit), frame.x(high / shown_unit), y + 7))
            parts += [
                _POINT.format(f"{frame.x(value / shown_unit):.1f}", f"{y + 17:.1f}")
                for value in points
            ]
    if limit:
        x = frame.x(limit[1] / shown_unit)
        parts.append(f'<path class="r" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>')
    described = "; ".join(
        f"{label}: " + ", ".join(f"{name} {show(value)}" for name, value in values)
        for label, values in bars[:8]
    )
    rows = [[name, *_shares(name, bars, sums, show)] for name in names]
    columns = ["part", *(label for label, _ in bars)]
    return Chart(slug, title, _svg(slug, title, described, (400, height), parts), columns, rows)


_POINT: Final = '<circle class="m2" cx="{}" cy="{}" r="1.6"/>'


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path class="w" d="M{low:.1f} {y:.1f}H{high:.1f}M{low:.1f} {y - 3:.1f}v6M{high:.1f} '
        f'{y - 3:.1f}v6"/>'
    )


def _swatch(style: int) -> str:
    return f'<rect class="a p{style}" y="-5" width="18" height="10"/>'


def _shares(
    name: str,
    bars: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    sums: Sequence[float],
    show: Callable[[float], str],
) -> Iterator[str]:
    for (_, parts), total in zip(bars, sums, strict=True):
        value = dict(parts).get(name)
        yield "" if value is None else f"{show(value)} ({value / (total or 1):.1%})"


def area_chart(
    slug: str, title: str, unit: str, parts: Sequence[tuple[str, Series]]
) -> Chart | None:
    """Draw parts stacked over steps; None where there are fewer than two points. All have the same
    steps.
    """
    if not parts or len(parts[0][1].steps) < 2:
        return None
    bins = list(_bins([series for _, series in parts], 180))
    most = max(sum(values) for *_, values in bins)
    if not most > 0:
        return None
    styles = [_STYLE_OF_PART.get(name, place % 8) for place, (name, _) in enumerate(parts)]
    legend, top = _legend(
        [(name, _swatch(style)) for (name, _), style in zip(parts, styles, strict=True)], 400
    )
    size = (400.0, top + 212)
    heights = ticks(0, most * 1.04)
    left = 14 + _CHARACTER * max(len(tick(value)) for value in heights)
    frame = _Frame(left, top + 18, 386, size[1] - 36, bins[0][0], bins[-1][1], 0, most * 1.04)
    drawn = [legend, _axes(frame, heights, unit, top)]
    below = [0.0] * len(bins)
    for index, style in enumerate(styles):
        above = [low + values[index] for low, (*_, values) in zip(below, bins, strict=True)]
        edges = [(edge, a, b) for c, a, b in zip(bins, above, below, strict=True) for edge in c[:2]]
        upper = "L".join(f"{frame.x(x):.1f} {frame.y(a):.1f}" for x, a, _ in edges)
        lower = "L".join(f"{frame.x(x):.1f} {frame.y(b):.1f}" for x, _, b in reversed(edges))
        drawn.append(f'<path class="a p{style}" d="M{upper}L{lower}z"/>')
        below = above
    described = (
        f"{unit} by part over optimizer steps, stacked: {', '.join(name for name, _ in parts)}."
    )
    lines = [Line(name, series) for name, series in parts]
    columns, rows, note = _table(lines)
    return Chart(slug, title, _svg(slug, title, described, size, drawn), columns, rows, "", note)


def _bins(series: Sequence[Series], most: int) -> Iterator[tuple[int, int, list[float]]]:
    """Divide the steps of series that have the same ones into at most so many columns that touch:
    first and last step, and the mean of each series.
    """
    steps = series[0].steps
    stride = -(-len(steps) // most)
    begin = 0
    for start in range(0, len(steps), stride):
        end = steps[min(start + stride, len(steps)) - 1]
        parts = [
            [value for value in each.values[start : start + stride] if math.isfinite(value)]
            for each in series
        ]
        yield begin, end, [max(0.0, sum(part) / len(part)) if part else 0.0 for part in parts]
        begin = end


_INK_ON_PART: Final = {"forward": "#000", "backward": "#fff"}


def timeline_chart(
    slug: str, title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]]
) -> Chart:
    """Draw who does what when, a row for each; of each part begin and length in ms, name and
    number.
    """
    begin = min((at for _, parts in rows for at, *_ in parts), default=0.0)
    length = max((at + each for _, parts in rows for at, each, *_ in parts), default=1.0) - begin
    names = list(dict.fromkeys(name for _, parts in rows for *_, name, _ in parts))
    styles = {name: _STYLE_OF_PART.get(name, place % 8) for place, name in enumerate(names)}
    sums = [
        {name: sum(each for _, each, own, _ in parts if own == name) for name in names}
        for _, parts in rows
    ]
    described = "; ".join(
        f"{label}: " + ", ".join(f"{name} {number(value)} ms" for name, value in each.items())
        for (label, _), each in zip(rows[:8], sums, strict=False)
    )

    def drawn(width: float) -> str:
        legend, top = _legend([(name, _swatch(style)) for name, style in styles.items()], width)
        height = top + 34 * len(rows) + 40
        frame = _Frame(14, top, width - 14, height - 36, 0, length, 0, 1)
        svg = [legend]
        for value in ticks(0, length):
            x = frame.x(value)
            svg.append(f'<path class="g" d="M{x:.1f} {frame.top:.1f}V{frame.bottom + 4:.1f}"/>')
            svg.append(
                f'<text x="{x:.1f}" y="{frame.bottom + 16:.1f}" '
                f'text-anchor="middle">{tick(value)}</text>'
            )
        svg.append(f'<text x="{width / 2:.0f}" y="{height - 5:.1f}" text-anchor="middle">ms</text>')
        for row, (label, parts) in enumerate(rows):
            y = top + 34 * row + 14
            svg.append(f'<text x="14" y="{y - 3:.1f}">{text(label)}</text>')
            for at, each, name, place in parts:
                x = frame.x(at - begin)
                wide = each / (length or 1) * (frame.right - frame.left)
                if wide >= 0.15:
                    shape = f'x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="14"'
                    about = f"<title>{text(name)} {place}: {number(each)} ms</title>"
                    svg.append(f'<rect class="p{styles[name]}" {shape}>{about}</rect>')
                ink = _INK_ON_PART.get(name)
                if ink and wide >= 4 + _CHARACTER * len(str(place)):
                    middle = f'x="{x + wide / 2:.1f}" y="{y + 11:.1f}" text-anchor="middle"'
                    svg.append(f'<text {middle} style="fill:{ink}">{place}</text>')
        return _svg(slug, title, described, (width, height), svg)

    columns = ["", *(f"{name} (ms)" for name in names)]
    table = [
        [label, *map(number, each.values())] for (label, _), each in zip(rows, sums, strict=True)
    ]
    return Chart(slug, title, drawn(400), columns, table, drawn(980))
