"""A drawn chart, and what all charts are made of: frame, axes, ticks, legend.

Charts are SVG, drawn without a package.

A chart is one ``<svg role="img">`` with a title and a description, its size in its view box. No
colour stands alone: lines of a chart differ in dashes as well, parts of a bar are named with their
figure, and every chart has its table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, Final

from framework.report.chart_style import STYLE
from framework.system.output import visible

CHARACTER_WIDTH: Final = 6.1  # width of a mean character of the font, in its 11 pixels
_LONGEST_NAME: Final = 34


def text(value: object) -> str:
    """Escape a text of unknown origin for HTML and SVG; control characters are made visible."""
    return escape(visible(str(value), keeps=""))


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
        remark: line below the drawing, on what its curves are.
    """

    slug: str
    title: str
    svg: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wide: str = ""
    note: str = ""
    remark: str = ""

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
class Frame:
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


def ticks(low: float, high: float, *, most: int = 5, is_log: bool = False) -> list[float]:
    """Return about `most` round values from `low` to `high`; only `low` without a range."""
    if is_log:
        return _powers_of_ten(low, high, most)
    if not high > low:
        return [low]
    stride = _round_stride((high - low) / most)
    first = math.ceil(low / stride - 1e-9)
    last = math.floor(high / stride + 1e-9)
    return [index * stride for index in range(first, min(last, first + 2 * most) + 1)]


def _powers_of_ten(low: float, high: float, most: int) -> list[float]:
    """Return the powers of ten between two values above 0, at most `most`; with fewer than two of
    them also the ends.
    """
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
    """Return the least of 1, 2, 5 and 10 times a power of ten that is at least `rough`."""
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
Across = tuple[str, Callable[[float], str]]
OVER_STEPS: Final[Across] = ("optimizer step", tick)


REFERENCE: Final = '<path class="r" d="M0 0h20"/>'


def left_of_ticks(heights: Sequence[float]) -> float:
    """Return the left edge of a frame: room for the ticks of its upright axis."""
    return 14 + CHARACTER_WIDTH * max(map(len, map(tick, heights)))


def draw_axes(
    frame: Frame, heights: Sequence[float], axis: str, top: float, across: Across = OVER_STEPS
) -> str:
    """Draw the grid with its ticks at `heights`, the ticks below, and the names of both axes; `top`
    is the pixel of the upright axis's name, and `across` the axis below.
    """
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
            parts.append(label_below(frame, x, across[1](value)))
    middle = (frame.left + frame.right) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{frame.bottom + 31:.1f}" '
        f'text-anchor="middle">{across[0]}</text>'
    )
    return "".join(parts)


def label_below(frame: Frame, x: float, label: str) -> str:
    return f'<text x="{x:.1f}" y="{frame.bottom + 16:.1f}" text-anchor="middle">{label}</text>'


def make_legend(entries: Sequence[tuple[str, str]], width: float) -> tuple[str, float]:
    """Return the legend below the title, in lines of at most `width` pixels, and the y coordinate
    where the drawing may begin. An entry is a label and the SVG of its symbol.
    """
    x = 6.0
    y = 38.0
    parts = []
    for label, symbol in entries:
        name = shortened(label, _LONGEST_NAME)
        needed = 36 + CHARACTER_WIDTH * len(visible(name, keeps=""))
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


def shortened(label: str, longest: int) -> str:
    if len(label) <= longest:
        return label
    return label[: longest - 3] + "..."


def svg_element(
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


def upright_lines(frame: Frame) -> Iterator[str]:
    """Draw the ticks of bars: lines through the frame, with their values below."""
    for value in ticks(frame.first, frame.last):
        x = frame.x(value)
        yield f'<path class="g" d="M{x:.1f} {frame.top:.1f}V{frame.bottom + 4:.1f}"/>'
        yield label_below(frame, x, tick(value))


def swatch(style: int) -> str:
    return f'<rect class="a p{style}" y="-5" width="18" height="10"/>'


def swatches(style_of: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(name, swatch(style)) for name, style in style_of.items()]
