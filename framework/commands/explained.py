"""Cause and fix of kinds of problems.

`problems.yaml` is the table of those that people meet most, with what a message has no room for:
for `dsf keys KIND` and for the pages of problems. Kinds that it lacks are explained by the rows of
the planner's rules, and by the linter.
"""

from __future__ import annotations

import posixpath
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
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
    """Return cause and fix of a kind in lines; None if there is neither."""
    if _is_in_table(kind):
        return _explain_by_table(kind, width)
    return _explain_by_rules(kind, width) or _explain_by_linter(kind)


def _is_in_table(kind: str) -> bool:
    return {"cause", "cure"} <= set(explanations().get(kind, {}))


def _explain_by_table(kind: str, width: int) -> str:
    entry = explanations()[kind]
    fold = _folding(width)
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


def _explain_by_rules(kind: str, width: int) -> str | None:
    """Return the ways in which the planner finds a kind, each with its key, and the source of the
    rule; None for a kind that none of its rows finds.
    """
    from deepspeed_lint.rows import cases_of, filled
    from framework.plan.rules.base import read_rows

    row = read_rows().get(kind)
    if row is None:
        return None
    # several cases may be found for one reason
    cases = dict.fromkeys(
        (f"cause: {case['key']}: {case['reason']}", f"fix: {case['fix']}") for case in cases_of(row)
    )
    fold = _folding(width)
    lines = [kind]
    for sentence in (*chain.from_iterable(cases), f"source: {row['source']}"):
        lines += fold(filled(sentence, str).replace("`", ""))  # a key in braces stays a key
    return "\n".join(lines)


def _explain_by_linter(kind: str) -> str | None:
    """Return the linter's explanation of a kind of its own; None for any other word."""
    from deepspeed_lint.explain import explain_kind as explain_kind_of_linter

    explanation = explain_kind_of_linter(kind)
    if explanation is None:
        return None
    return str(explanation)


def _folding(width: int) -> Callable[[str], list[str]]:
    """Return a function that folds a text into lines of an entry."""
    return partial(
        textwrap.wrap,
        width=width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def kinds_in(lines: str) -> list[str]:
    """Return the kinds of problems that lines state."""
    return _KIND.findall(lines)


def write_hint(kinds: Iterable[str]) -> None:
    """Name the command for cause and fix of the first of some kinds that the table has, on a
    terminal: the others have them in their messages.
    """
    if not is_terminal(sys.stderr):
        return
    for kind in kinds:
        if _is_in_table(kind):
            write(sys.stderr, f"more: dsf keys {kind}\n")
            return
