"""Charts as PNG, for where no SVG is taken: drawn by resvg, of the extra `bench`."""

from __future__ import annotations

import re
import struct
import zlib
from typing import Final

from framework.errors import ConfigError, missing_package

MARK: Final = b"tEXtSoftware\0dsf-trainer"
"""In the head of every picture."""

_HEAD_BYTES: Final = 33  # signature, and the chunk of sizes
_ZOOM: Final = 2  # pixels for one of the drawing's
# resvg takes generic families for these of Windows alone.
_FAMILIES: Final = ("Arial", "DejaVu Sans", "Liberation Sans", "Noto Sans", "Helvetica")
_STYLE: Final = re.compile(r"(?<=<style>).*?(?=</style>)", re.DOTALL)
_MEDIA: Final = re.compile(r"@media[^{}]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_USE: Final = re.compile(r"var\(--([\w-]+)\)")


def png_of(svg: str) -> bytes:
    """Draw a chart's SVG file in its light colours, on white if it has no ground; returns the bytes
    of a PNG that bears `MARK`.

    Raises:
        ConfigError: resvg is not installed, or finds no font.
    """
    frame = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    text = frame.format('<text y="15" font-family="sans-serif">x</text>')
    blank = frame.format("")
    family = ""
    for candidate in _FAMILIES:
        if _drawn(text, candidate) != _drawn(blank, candidate):
            family = candidate
            break
    if not family:
        fix = "install one, such as the system's package fonts-dejavu-core, or take the SVG"
        raise ConfigError.of(
            "font-missing", "PNG: this machine has no font, and a chart would have no words", fix
        )
    match = _STYLE.search(svg)
    style = _MEDIA.sub("", match[0]) if match else ""
    values = dict(re.findall(r"--([\w-]+):([^;{}]+)", style))
    # resvg knows no CSS variables: their values replace them in the style and in the ground's fill.
    style = _USE.sub(lambda use: values[use[1]], style)
    svg = re.sub(f'(?<=fill="){_USE.pattern}(?=")', lambda use: values[use[1]], svg)
    picture = _drawn(_STYLE.sub(lambda _: style, svg, count=1), family)
    chunk = struct.pack(">I", len(MARK) - 4) + MARK + struct.pack(">I", zlib.crc32(MARK))
    return picture[:_HEAD_BYTES] + chunk + picture[_HEAD_BYTES:]


def _drawn(svg: str, family: str) -> bytes:
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError:
        raise missing_package("resvg-py", what="PNG", extra="bench") from None
    return svg_to_bytes(
        svg_string=svg,
        zoom=_ZOOM,
        background="#ffffff",
        font_family=family,
        sans_serif_family=family,
    )
