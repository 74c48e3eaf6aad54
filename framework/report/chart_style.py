"""Colours and dashes of charts, as CSS.

The page, or the style of a chart's own file, decides light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
    + ".chart .h{fill:transparent}.chart .h:hover{fill:var(--soft);fill-opacity:.15}"
    + "".join(map(_class_styles, range(STYLES)))
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


def part_styles(names: Sequence[str]) -> dict[str, int]:
    return {name: _STYLE_OF_PART.get(name, place % 8) for place, name in enumerate(names)}
