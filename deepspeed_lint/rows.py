"""Rows of a table of rules.

A row's problem is there if all of ``when`` holds and none of ``unless``. If one kind is found in
several ways, each of the ``cases`` has what differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, Final

from deepspeed_lint.errors import Severity

Row = Mapping[str, Any]
# Key, reason and fix, and the severity if it is not the rule's.
Finding = tuple[str, str, str] | tuple[str, str, str, Severity]
_FILLED_IN: Final = re.compile(r"\{([\w.]+)\}")


def cases_of(row: Row) -> list[Row]:
    """Return the ways in which a row's kind is found, as complete rows."""
    when = row.get("when", {})
    cases: list[Row] = []
    for case in row.get("cases", [{}]):
        cases.append({**row, **case, "when": when | case.get("when", {})})
    return cases


def findings(
    cases: list[Row], holds: Callable[[str, Any], bool], value: Callable[[str], object]
) -> Iterator[tuple[str, str, str, Severity]]:
    """Yield key, reason, fix and severity of each case of a row that is there.

    Args:
        holds: whether a key, or a fact, is as ``when`` and ``unless`` want it.
        value: replaces a name in braces in a sentence.
    """

    for case in cases:
        if _is_there(case, holds):
            severity = case.get("severity", "error")
            reason = filled(case["reason"], value)
            yield case["key"], reason, filled(case["fix"], value), severity


def _is_there(case: Row, holds: Callable[[str, Any], bool]) -> bool:
    # A loop: a search asks this tens of thousands of times.
    for key, wanted in case["when"].items():
        if not holds(key, wanted):
            return False
    unless = case.get("unless", {})
    return not any(holds(key, wanted) for key, wanted in unless.items())


def filled(sentence: str, value: Callable[[str], object]) -> str:
    """Replace each name in braces by its value."""
    return _FILLED_IN.sub(lambda name: str(value(name[1])), sentence)


def is_between(number: float | None, wanted: Mapping[str, float]) -> bool:
    """Check whether a number is ``above`` and ``below`` what a row wants."""
    return number is not None and wanted.get("below", inf) > number > wanted.get("above", -inf)
