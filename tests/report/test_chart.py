"""Charts: no peak is lost, every value lies inside the frame, colours serve readers who see fewer
of them.
"""

from __future__ import annotations

import math
import random
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.report.area_chart import area_chart
from framework.report.bar_chart import bar_chart
from framework.report.chart import Chart, tick, ticks
from framework.report.chart_style import DARK, LIGHT
from framework.report.line_chart import Line, Mark, line_chart, thin
from framework.report.records import Series

SVG = "{http://www.w3.org/2000/svg}"
NAN = math.nan


def chart(*lines: Line, **options: object) -> Chart:
    found = line_chart("loss", "Loss", "loss", lines, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def coordinates(svg: str) -> list[tuple[float, float]]:
    """Points of the curves and dots of a chart."""
    paths = re.findall(r'<path class="(?:l l|a p)\d+" d="(M[^"]{9,})"', svg)
    found = [pair for path in paths for pair in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]
    return [(float(x), float(y)) for x, y in found]


def test_thinning_keeps_extremes_ends_and_order() -> None:
    draw = random.Random(0)
    series = Series(list(range(100_000)), [draw.random() for _ in range(100_000)])
    series.values[54_321], series.values[77_777] = 50.0, -50.0
    (piece,) = thin(series, 300)
    assert len(piece) <= 602
    assert piece == sorted(piece)
    assert {
        (54_321, 50.0),
        (77_777, -50.0),
        (0, series.values[0]),
        (99_999, series.values[-1]),
    } <= set(piece)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(NAN), min_size=1, max_size=300), st.integers(1, 20))
def test_thinning_invents_nothing(values: list[float], columns: int) -> None:
    series = Series(list(range(len(values))), values)
    pieces = thin(series, columns)
    kept = [pair for piece in pieces for pair in piece]
    assert all(values[step] == value for step, value in kept)
    assert kept == sorted(kept)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        drawn = [value for _, value in kept]
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))
    else:
        assert kept == []


def test_a_short_series_breaks_where_it_is_no_number() -> None:
    assert thin(Series([1, 2, 3, 4], [1.0, NAN, 3.0, 4.0]), 300) == [
        [(1, 1.0)],
        [(3, 3.0), (4, 4.0)],
    ]
    assert thin(Series(), 10) == []


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 8))
def test_ticks_are_round_and_inside(low: float, width: float, most: int) -> None:
    high = low + width
    found = ticks(low, high, most=most)
    assert found == sorted(found)
    assert len(found) <= 2 * most + 1
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= value <= high + slack for value in found)


def test_ticks_of_logarithmic_axes_are_powers() -> None:
    assert ticks(0.05, 200, is_log=True) == [0.1, 1.0, 10.0, 100.0]
    assert ticks(2, 80, is_log=True) == [2, 10.0, 80]
    assert len(ticks(1e-30, 1e30, is_log=True)) <= 6
    assert ticks(5, 5, is_log=True) == [5]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1500, "1500"), (15000, "15k"), (2.5e6, "2.5M"), (0.001, "0.001"), (-3e12, "-3T")],
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert tick(value) == text


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 3.0],
        [0.0, 0.0, 0.0],
        [5.0],
        [-1e300, 0.0, 1e300],
        [1e-300, 1.0, 1e300],
        [NAN, 2.0, NAN],
        [-5.0, -5.0],
        [1e-12, 1e-12],
        [5e-324, 1.0],
    ],
    ids=str,
)
def test_curves_lie_inside_the_frame(values: list[float]) -> None:
    found = chart(Line("a", Series(list(range(len(values))), values)), has_wide=True)
    for svg, width, height in ((found.svg, 400, 250), (found.wide, 980, 340)):
        places = coordinates(svg)
        assert places
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_nothing_to_draw_is_no_chart() -> None:
    assert line_chart("a", "A", "a", []) is None
    assert line_chart("a", "A", "a", [Line("x", Series([1], [NAN]))]) is None
    assert bar_chart("a", "A", "a", []) is None
    assert bar_chart("a", "A", "a", [("x", [("y", 0.0)])]) is None
    assert area_chart("a", "A", "a", [("x", Series([1], [1.0]))]) is None


def test_a_chart_has_title_description_axes_and_table() -> None:
    found = chart(
        Line("train/loss", Series([10, 20, 30], [3.0, 2.0, 1.0])),
        Line("eval/loss", Series([20], [2.5]), 1, True),
        marks=[Mark("save", 20), Mark("skip", 10)],
        reference=("plan", 2.2),
    )
    root = ElementTree.fromstring(found.svg)
    assert root.get("role") == "img"
    named = {
        element.get("id"): element.text
        for element in root
        if element.tag in (f"{SVG}title", f"{SVG}desc")
    }
    assert list(named) == (root.get("aria-labelledby") or "").split()
    title, described = named.values()
    assert title == "Loss"
    assert described == (
        "loss over optimizer steps; from 1 to 3. train/loss: 1 at the end, eval/loss: 2.5 at the end."
    )
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {
        "Loss",
        "loss",
        "optimizer step",
        "train/loss",
        "eval/loss",
        "checkpoint",
        "skipped step",
    } <= set(texts)
    assert found.columns == ["step", "train/loss", "eval/loss"]
    assert found.rows == [["10", "3", ""], ["20", "2", "2.5"], ["30", "1", ""]]


def test_a_point_alone_is_seen() -> None:
    assert chart(Line("a", Series([2, 4], [1.0, NAN]))).svg.count("<circle") == 1
    assert chart(Line("a", Series([2, 4], [1.0, 2.0]))).svg.count("<circle") == 0


def test_values_over_orders_of_magnitude_have_a_logarithmic_axis() -> None:
    assert "loss (log scale)" in chart(Line("a", Series([1, 2], [1.0, 100.0]))).svg
    assert "(log scale)" not in chart(Line("a", Series([1, 2], [0.0, 100.0]))).svg
    assert "(log scale)" not in chart(Line("a", Series([1, 2], [1.0, 20.0]))).svg


def test_a_table_of_many_steps_is_thinned_and_reports_it() -> None:
    found = chart(Line("a", Series(list(range(10_000)), [1.0] * 10_000)))
    assert len(found.rows) <= 42
    assert (found.rows[0][0], found.rows[-1][0]) == ("0", "9,999")
    assert found.note == f"{len(found.rows)} of 10,000 steps; metrics.jsonl has all"


def test_a_file_of_its_own_is_xml_with_its_style() -> None:
    hostile = 'a<b>&"\x1b\u202e\ud800]]>'
    line, bar = (
        chart(Line(hostile, Series([1], [1.0])), Line("b", Series([1], [1.0]))),
        bar_chart("x", hostile, hostile, [(hostile, [(hostile, 1.0), ("y", 2.0)])]),
    )
    assert bar is not None
    for found in (line, bar):
        text = found.file()
        root = ElementTree.fromstring(text.encode())
        assert root.find(f"{SVG}style") is not None
        assert "prefers-color-scheme:dark" in text
        assert "\\x1b\\u202e\\ud800" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_bars_show_each_part_with_its_share() -> None:
    found = bar_chart("x", "Time", "ms", [("a", [("forward", 30.0), ("data", 10.0)])])
    assert found is not None
    widths = [
        float(width) for width in re.findall(r'x="[\d.]+" y="[\d.]+" width="([\d.]+)"', found.svg)
    ]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert sum(widths) == pytest.approx(372, abs=0.2)
    assert found.rows == [["forward", "30 (75.0%)"], ["data", "10 (25.0%)"]]
    assert ">forward 30 (75%)<" in found.svg


def test_areas_stack_to_the_whole() -> None:
    steps = list(range(1, 501))
    found = area_chart(
        "x", "T", "ms", [("a", Series(steps, [1.0] * 500)), ("b", Series(steps, [3.0] * 500))]
    )
    assert found is not None
    first, second = re.findall(r'<path class="a p\d" d="([^"]+)"', found.svg)
    heights = [
        sorted({float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)})
        for path in (first, second)
    ]
    (top_a, bottom), (top_b, bottom_b) = heights
    assert bottom_b == top_a
    assert (bottom - top_b) == pytest.approx(4 * (bottom - top_a), rel=0.01)


# What readers with each kind of colour blindness see of linear RGB (Machado, Oliveira, Fernandes
# 2009, severity 1).
SEEN = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
    "all colours": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}


def linear(color: str) -> list[float]:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(color: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """CIELAB of a colour as it is seen."""
    parts = linear(color)
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, parts, strict=True)))) for row in seen
    )
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(color: str, paper: str) -> float:
    """Contrast ratio of WCAG 2."""
    light, dark = sorted(
        (
            sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(each), strict=True))
            for each in (color, paper)
        ),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("reader", SEEN)
@pytest.mark.parametrize(
    ("colors", "paper"), [(LIGHT, "#ffffff"), (DARK, "#14171b")], ids=["light", "dark"]
)
def test_lines_differ_for_every_reader(colors: tuple[str, ...], paper: str, reader: str) -> None:
    places = [lab(color, SEEN[reader]) for color in colors]
    assert min(math.dist(a, b) for a, b in combinations(places, 2)) > 25
    assert min(contrast(color, paper) for color in colors) > 3
