"""Parts of every rule: its kind and severity, and how what it finds becomes a problem.

A rule that asks for settings only, and computes nothing, is a row of a table: ``when`` has what must hold for the
problem to be there, all of it, and ``unless`` what must not. A key is ``given`` (somebody has written it), ``on`` or
``off``, ``above`` or ``below`` a number, or has one of the values of a list; what a section lacks is null. In a
sentence ``{zero.stage}`` is that key's value. Where one kind is found in several ways, ``cases`` have what differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.errors import Problem, Severity
from framework.plan.cluster import Cluster

Rule = Callable[[RunConfig, Cluster], Iterator[Problem]]
# Key, reason and fix, and the severity where it is not the rule's.
Finding = tuple[str, str, str] | tuple[str, str, str, Severity]
# A whole problem where its kind or its value is not the rule's.
Found = Iterator[Finding | Problem]
LISTED: Final[list[Rule]] = []
Row = Mapping[str, Any]
_FILLED_IN: Final = re.compile(r"\{([\w.]+)\}")


def rule(kind: str = "", severity: Severity = "error") -> Callable[[Callable[[RunConfig, Cluster], Found]], Rule]:
    """List a function as a rule: its findings become problems of this kind, with the value that their key has."""

    def listed(find: Callable[[RunConfig, Cluster], Found]) -> Rule:
        @wraps(find)
        def check(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
            for found in find(config, cluster):
                if not isinstance(found, Problem):
                    key, reason, fix, *own = found
                    level: Severity = own[0] if own else severity
                    found = Problem(kind, reason, fix, key, attrgetter(key)(config), severity=level)
                yield found

        LISTED.append(check)
        return check

    return listed


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
        is_there, is_excepted = ([holds(*each) for each in case.get(part, {}).items()] for part in ("when", "unless"))
        if all(is_there) and not any(is_excepted):
            reason, fix = (_FILLED_IN.sub(lambda name: str(value(name[1])), case[part]) for part in ("reason", "fix"))
            yield case["key"], reason, fix, case.get("severity", "error")


def is_between(number: float | None, wanted: Mapping[str, float]) -> bool:
    """Check whether a number is ``above`` and ``below`` what a row wants."""
    return number is not None and wanted.get("below", inf) > number > wanted.get("above", -inf)


def _value(config: RunConfig, cluster: Cluster, name: str) -> Any:
    """Return the value of a key, None where its section lacks it; an unread section is an AttributeError."""
    section, *rest = name.split(".")
    value = cluster.device if section == "cluster" else getattr(config, section)
    for part in rest if section != "cluster" else ():
        value = getattr(value, part, None)
    return value


def _holds(config: RunConfig, cluster: Cluster, name: str, wanted: Any) -> bool:
    value = _value(config, cluster, name)
    if wanted == "given":
        section, _, key = name.partition(".")
        return key in getattr(config, section).model_fields_set
    if isinstance(wanted, str):
        return bool(value) is (wanted == "on")
    return value in wanted if isinstance(wanted, list) else is_between(value, wanted)


def list_rows() -> None:
    """List the rows of ``rules.json`` as rules."""
    for kind, row in json.loads(Path(__file__).with_name("rules.json").read_text(encoding="utf-8")).items():

        def find(config: RunConfig, cluster: Cluster, cases: list[Row] = cases_of(row)) -> Found:  # noqa: B008 - one each
            yield from findings(cases, partial(_holds, config, cluster), partial(_value, config, cluster))

        find.__name__, find.__doc__ = kind.replace("-", "_"), row["source"]
        rule(kind)(find)
