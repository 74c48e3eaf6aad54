"""Cause and fix of the kinds of problems that people meet most: what a message has no room for.

`problems.yaml` is the one table of them: for `dsf keys KIND` and for the pages of problems.
"""

from __future__ import annotations

import posixpath
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final

from framework.errors import is_terminal
from framework.system.output import write

TABLE: Final = Path(__file__).with_name("problems.yaml")
# The last words of a line that states a problem.
_KIND: Final = re.compile(r"\[([a-z][a-z0-9]*(?:-[a-z0-9]+)+)\]$", re.MULTILINE)
_LINK: Final = re.compile(r"\]\(([^)#]*)[^)]*\)")
_WIDEST: Final = 100
_PAGES: Final = "docs/reference/problems"  # links of the table begin there
_MADE: Final = ("docs/reference/", "docs/coming-from.md")  # for the site, and no files of docs/


@cache
def explanations() -> Mapping[str, Mapping[str, str]]:
    """Return kind -> seen, cause, cure and see, as far as the table has them."""
    import yaml

    table: Mapping[str, Mapping[str, str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def explain_kind(kind: str, *, width: int = _WIDEST) -> str | None:
    """Return cause and fix of a kind in lines; None if the table does not have both."""
    entry = explanations().get(kind, {})
    if not {"cause", "cure"} <= set(entry):
        return None
    fold = partial(
        textwrap.wrap,
        width=width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [kind]
    lines += fold(f"cause: {entry['cause']}".replace("`", ""))
    lines += fold(f"fix: {entry['cure']}".replace("`", ""))
    if "seen" in entry:
        lines += fold(f"seen: {entry['seen']}")
    for link in _LINK.findall(entry.get("see", "")):
        page = posixpath.normpath(posixpath.join(_PAGES, link))
        if not page.startswith(_MADE):
            lines.append(f"  more: {page}")
    return "\n".join(lines)


def kinds_in(lines: str) -> list[str]:
    """Return the kinds of problems that lines state."""
    return _KIND.findall(lines)


def write_hint(kinds: Iterable[str]) -> None:
    """Name the command for cause and fix of the first of some kinds that has them, on a
    terminal.
    """
    if not is_terminal(sys.stderr):
        return
    for kind in kinds:
        if explain_kind(kind) is not None:
            write(sys.stderr, f"more: dsf keys {kind}\n")
            return
