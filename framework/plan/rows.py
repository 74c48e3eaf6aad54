"""Rows of a table of rules, for run configs and for DeepSpeed JSON: ``when`` has what must hold for
the problem to be there, all of it, and ``unless`` what must not. Where one kind is found in several
ways, ``cases`` have what differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, Final

from framework.errors import Severity

Row = Mapping[str, Any]
# Key, reason and fix, and the severity where it is not the rule's.
Finding = tuple[str, str, str] | tuple[str, str, str, Severity]
_FILLED_IN: Final = re.compile(r"\{([\w.]+)\}")


def cases_of(row: Row) -> list[Row]:
    """The ways in which a row's kind is found, each with all that belongs to it."""
    when = row.get("when", {})
    return [{**row, **case, "when": when | case.get("when", {})} for case in row.get("cases", [{}])]


def findings(
    cases: list[Row], holds: Callable[[str, Any], bool], value: Callable[[str], object]
) -> Iterator[tuple[str, str, str, Severity]]:
    """Key, reason, fix and severity of each case of a row that is there.

    Args:
        holds: whether a key, or a fact, is as ``when`` and ``unless`` want it.
        value: what stands in a sentence for a name in braces.
    """
    for case in cases:
        is_there = all(holds(*each) for each in case["when"].items())
        if is_there and not any(holds(*each) for each in case.get("unless", {}).items()):
            reason, fix = (
                _FILLED_IN.sub(lambda name: str(value(name[1])), case[part])
                for part in ("reason", "fix")
            )
            yield case["key"], reason, fix, case.get("severity", "error")


def is_between(number: float | None, wanted: Mapping[str, float]) -> bool:
    """Check whether a number is ``above`` and ``below`` what a row wants."""
    return number is not None and wanted.get("below", inf) > number > wanted.get("above", -inf)
