"""Parts of every rule: its kind, severity and releases, and how its findings become problems.

A rule that asks for settings only, and computes nothing, is a row of `tables/rules.json`, as
`deepspeed_lint/rows.py` has it. A key of DeepSpeed is ``given``, ``left out``, ``written`` (null,
perhaps), ``true`` (any true value will do), ``on``, ``off`` (in the file), ``not on``, ``not off``
(or left out), ``above`` or ``below`` a number; a fact of `Facts`, or a key that holds text, has
one of the values of a list. In a sentence ``{stage}`` is that fact's value, and
``{zero_optimization.offload_param}`` that key as the file spells it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from math import isqrt
from typing import Any, Final

from deepspeed_lint.errors import Problem, Severity
from deepspeed_lint.facts import Facts
from deepspeed_lint.key_files import TABLES
from deepspeed_lint.keys import load_table
from deepspeed_lint.rows import Finding, Row, cases_of, findings, is_between

Rule = Callable[[Facts], Iterator[Problem]]
Found = Iterator[Finding]
ALL: Final[list[Rule]] = []


def rule(
    severity: Severity = "error", *, on: str = "", since: str = "", before: str = ""
) -> Callable[[Callable[[Facts], Found]], Rule]:
    """List a function as a rule: its name, with dashes, is the kind of the problems that its
    findings become.

    Args:
        severity: an error is what DeepSpeed refuses or breaks on; a warning what it takes and does
            otherwise; a note depends on code outside the JSON.
        on: a flag that must be on.
        since: the first release that it is about.
        before: the first release that it is no longer about.
    """

    def listed(find: Callable[[Facts], Found]) -> Rule:
        kind = find.__name__.replace("_", "-")

        @wraps(find)
        def judge(facts: Facts) -> Iterator[Problem]:
            if facts.is_release(since, before) and (not on or facts.flag(on)):
                for finding in find(facts):
                    yield _problem(kind, finding, facts, severity)

        ALL.append(judge)
        return judge

    return listed


def _problem(kind: str, finding: Finding, facts: Facts, severity: Severity) -> Problem:
    """Build the problem of a finding; its severity wins over the rule's."""
    key, reason, fix = finding[:3]
    if len(finding) == 4:
        severity = finding[3]
    return Problem(kind, reason, fix, facts.written(key), facts.raw(key), severity=severity)


_STATES: Final[Mapping[str, Callable[[Facts, str], object]]] = {
    "given": Facts.given,
    "left out": lambda facts, key: not facts.given(key),
    "written": lambda facts, key: _is_written(facts, key),
    "not written": lambda facts, key: not _is_written(facts, key),
    "true": lambda facts, key: facts.get(key),
    "not true": lambda facts, key: not facts.get(key),
    "on": lambda facts, key: facts.flag(key),
    "off": lambda facts, key: facts.flag(key, True) is False,
    "not on": lambda facts, key: facts.flag(key) is False,
    "not off": lambda facts, key: facts.flag(key, True),
}


def _is_written(facts: Facts, key: str) -> bool:
    section, _, name = key.rpartition(".")
    if section:
        return name in facts.section(section)
    return name in facts.values


def _holds(facts: Facts, name: str, wanted: Any) -> bool:
    """Check whether a key, or a fact, is as a row wants it."""
    if isinstance(wanted, str):
        return bool(_STATES[wanted](facts, name))
    is_fact = hasattr(Facts, name)
    if isinstance(wanted, list):
        value = getattr(facts, name) if is_fact else facts.text(name)
        return value in wanted
    number = getattr(facts, name) if is_fact else _number(facts, name)
    return is_between(number, wanted)


def _number(facts: Facts, name: str) -> float | None:
    key = load_table().get(name)
    if key is not None and key.types == ("integer",):
        return facts.whole(name)
    return facts.number(name)


def _value_in_sentence(facts: Facts, name: str) -> object:
    """Return what stands in a sentence for a name: a fact's value, a key as the file spells it."""
    if "." in name:
        return facts.written(name)
    return getattr(facts, name)


def list_rows() -> None:
    """List the rows of `tables/rules.json` as rules."""
    for kind, row in json.loads((TABLES / "rules.json").read_text(encoding="utf-8")).items():

        def find(facts: Facts, cases: list[Row] = cases_of(row)) -> Found:  # noqa: B008 - one each
            holds = partial(_holds, facts)
            return findings(cases, holds, partial(_value_in_sentence, facts))

        find.__name__ = kind.replace("-", "_")
        find.__doc__ = row["source"]
        rule(since=row.get("since", ""), before=row.get("before", ""))(find)


def divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is smaller than the limit, 1 at least."""
    largest = 1
    for divisor in range(1, isqrt(number) + 1):
        if number % divisor == 0:
            for candidate in (divisor, number // divisor):
                if largest < candidate < limit:
                    largest = candidate
    return largest


def in_the_way(keys: Mapping[str, tuple[str, object]], reason: str, otherwise: str = "") -> Found:
    """Yield a finding for each key that is in the way.

    Args:
        keys: key -> (text of the value to set, whether the file's own value is in the way).
        reason: why that is in the way.
        otherwise: text of another fix, which follows the value.
    """
    for key, (right, is_wrong) in keys.items():
        if is_wrong:
            yield key, reason, f"set {key}: {right}{otherwise}"
