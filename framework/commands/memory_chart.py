"""A chart of memory by component over strategies, as SVG written by hand: stacked bars, and the device's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, log10
from typing import Final

from framework.commands.strategies import BUFFERS, MEMORY_GROUPS, grouped
from framework.plan.search import OFFLOAD, PIPE, RECOMPUTE, STAGE, Candidate

# Okabe and Ito's colours, which the colour-blind tell apart (jfly.uni-koeln.de/color), on white and on black alike.
_COLOURS: Final = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#999999")
_WIDTH: Final = 760
_LEFT: Final = 250
_RIGHT: Final = 70
_BAR: Final = 22
_PITCH: Final = 34
_TOP: Final = 64
_GIB: Final = 2**30
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#222}.s{fill:#666}.g{stroke:#ddd}.l{stroke:#d55e00;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.s{fill:#aaa}.g{stroke:#444}}"
)


def draw_chart(candidates: Sequence[Candidate], *, limit_bytes: int | None, title: str) -> str:
    """Draw each candidate's fullest moment as a bar of its components, the first one on top.

    Args:
        candidates: strategies, the best one first.
        limit_bytes: usable memory of a device, drawn as a line; None: not known.
        title: what is planned.
    """
    most = max([*(each.peak_bytes for each in candidates), limit_bytes or 0]) / _GIB
    step = _tick(most)
    scale = (_WIDTH - _LEFT - _RIGHT) / (ceil(most / step) * step)
    height = _TOP + _PITCH * len(candidates) + 30
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>Memory of {escape(title)} by strategy</title><style>{_STYLE}</style>",
            f'<text x="8" y="20">{escape(title)}: memory of a device at its fullest, estimated, GiB</text>',
            *_legend(),
            *_grid(step, scale, height - 26),
            *(line for number, each in enumerate(candidates) for line in _bar(each, _TOP + _PITCH * number, scale)),
            *(_limit(limit_bytes / _GIB, scale, height - 26) if limit_bytes else ()),
            "</svg>\n",
        )
    )


def _tick(most: float) -> float:
    """A round distance of about a sixth of the axis."""
    unit = 10.0 ** int(log10(most / 6) // 1) if most > 0 else 1.0
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= most / 6 or factor == 10)


def _legend() -> Iterator[str]:
    left = 8
    for name, colour in zip((*MEMORY_GROUPS, BUFFERS), _COLOURS, strict=True):
        yield f'<rect x="{left}" y="32" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{left + 17}" y="43">{name}</text>'
        left += 34 + 8 * len(name)


def _grid(step: float, scale: float, bottom: float) -> Iterator[str]:
    number = 0
    while (x := _LEFT + number * step * scale) <= _WIDTH - _RIGHT + 1:
        yield f'<path class="g" d="M{x:.1f} {_TOP - 8}V{bottom:.1f}"/>'
        yield f'<text class="s" x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{number * step:g}</text>'
        number += 1


def _bar(candidate: Candidate, y: float, scale: float) -> Iterator[str]:
    memory, left = candidate.memory, float(_LEFT)
    yield f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(_name(candidate))}</text>'
    parts = grouped(memory.moments[memory.peak], MEMORY_GROUPS, BUFFERS)
    for (name, size), colour in zip(parts.items(), _COLOURS, strict=True):
        width = size / _GIB * scale
        about = f"<title>{name} {size / _GIB:.2f} GiB</title>"
        yield f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}">{about}</rect>'
        left += width
    yield f'<text class="s" x="{left + 5:.1f}" y="{y + 16}">{candidate.peak_bytes / _GIB:.1f}</text>'


def _limit(gib: float, scale: float, bottom: float) -> Iterator[str]:
    x = _LEFT + gib * scale
    yield f'<path class="l" d="M{x:.1f} {_TOP - 12}V{bottom:.1f}"/>'
    yield f'<text x="{x:.1f}" y="{_TOP - 15}" text-anchor="end">usable {gib:.4g} GiB</text>'


def _name(candidate: Candidate) -> str:
    settings, layout = candidate.settings, candidate.plan.layout
    words = [f"ZeRO {settings.get(STAGE, candidate.plan.config.zero.stage)}"]
    words += ["host" if settings.get(OFFLOAD) == "cpu" else "", "recompute" if settings.get(RECOMPUTE) else ""]
    words += [f"pipe {layout.pipe_size}" if settings.get(PIPE, 1) > 1 else ""]
    return ", ".join([*filter(None, words), f"{layout.micro_size} x {layout.accumulation_steps}"])
