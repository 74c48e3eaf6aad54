"""Problems on a terminal: in colours, and folded to its width."""

from __future__ import annotations

import re
import textwrap
from typing import Final

_RED: Final = "\x1b[1;31m"
_YELLOW: Final = "\x1b[1;33m"
_CYAN: Final = "\x1b[36m"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_INDENT: Final = "    "
# A problem as one line: its severity unless it is an error, its place or key, the text, its kind.
_PROBLEM: Final = re.compile(
    r"((?:warning|note): )?(.*?: )?(.*?)( \[[a-z][a-z0-9]*(?:-[a-z0-9]+)+\])?"
)


def painted(line: str, *, width: int | None = None, colours: bool = True) -> str:
    """Return a line that states a problem in colours, and any other line as it is: an error is red
    where it begins, a warning yellow, a note cyan; the kind is dim.

    `width`: columns to fold it to; later lines of it are indented.
    """
    body = line.rstrip("\n")
    line_end = line[len(body) :]
    match = _PROBLEM.fullmatch(body)
    if match is None:
        return line
    severity, place, text, kind = match.groups()
    if not severity and not kind:
        return line
    head = f"{severity or ''}{place or ''}"
    tail = kind or ""
    if width is not None and len(body) > width:
        body = "\n".join(_folded(body, width))
        head = head.rstrip() if body.startswith(head.rstrip()) else ""
        tail = tail.strip()
        text = body[len(head) : len(body) - len(tail)]
    if not colours:
        return f"{head}{text}{tail}{line_end}"
    colour = {"warning: ": _YELLOW, "note: ": _CYAN}.get(severity or "", _RED)
    if head:
        head = f"{colour}{head}{_PLAIN}"
    if tail:
        tail = f"{_DIM}{tail}{_PLAIN}"
    return f"{head}{text}{tail}{line_end}"


def _folded(line: str, width: int) -> list[str]:
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
