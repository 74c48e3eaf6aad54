"""Parts of every rule: its kind, severity and releases, and how what it finds becomes a problem.

A rule that asks for settings only, and computes nothing, is a row of `tables/rules.json`: ``when`` has what must hold
for the problem to be there, all of it, and ``unless`` what must not. A key of DeepSpeed is ``given``, ``left out``,
``on``, ``off`` (the file says so), ``not on``, ``not off`` (or left out), ``above`` or ``below`` a number; a fact of
`Facts`, or a key that holds text, has one of the values of a list. In a sentence ``{stage}`` is that fact's value, and
``{zero_optimization.offload_param}`` that key as the file spells it. Where one kind is found in several ways, ``cases``
have what differs between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from math import inf, isqrt
from typing import Any, Final

from framework.dslint.facts import Facts
from framework.dslint.key_files import TABLES
from framework.dslint.keys import load_table
from framework.errors import Problem, Severity

Rule = Callable[[Facts], Iterator[Problem]]
# Key, reason and fix, and the severity where it is not the rule's.
Found = Iterator[tuple[str, str, str] | tuple[str, str, str, Severity]]
ALL: Final[list[Rule]] = []


def rule(
    severity: Severity = "error", *, on: str = "", since: str = "", before: str = ""
) -> Callable[[Callable[[Facts], Found]], Rule]:
    """List a function as a rule: its name, with dashes, is the kind of the problems that its findings become.

    Args:
        severity: an error is what DeepSpeed refuses or breaks on; a warning what it takes and does otherwise; a note
            depends on code outside the JSON.
        on: a flag that must be on.
        since: the first release that it is about.
        before: the first release that it is no longer about.
    """

    def listed(find: Callable[[Facts], Found]) -> Rule:
        kind = find.__name__.replace("_", "-")

        @wraps(find)
        def judge(facts: Facts) -> Iterator[Problem]:
            if facts.is_release(since, before) and (not on or facts.flag(on)):
                for key, reason, fix, *own in find(facts):
                    level: Severity = own[0] if own else severity
                    yield Problem(kind, reason, fix, facts.written(key), facts.raw(key), severity=level)

        ALL.append(judge)
        return judge

    return listed


_STATES: Final[Mapping[str, Callable[[Facts, str], object]]] = {
    "given": Facts.given,
    "left out": lambda facts, key: not facts.given(key),
    "on": lambda facts, key: facts.flag(key),
    "off": lambda facts, key: facts.flag(key, True) is False,
    "not on": lambda facts, key: facts.flag(key) is False,
    "not off": lambda facts, key: facts.flag(key, True),
}
_FILLED_IN: Final = re.compile(r"\{([\w.]+)\}")


def _holds(facts: Facts, name: str, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return bool(_STATES[wanted](facts, name))
    is_fact = hasattr(Facts, name)
    if isinstance(wanted, list):
        return (getattr(facts, name) if is_fact else facts.text(name)) in wanted
    key = load_table().get(name)
    read = facts.whole if key is not None and key.types == ("integer",) else facts.number
    number = getattr(facts, name) if is_fact else read(name)
    return number is not None and wanted.get("below", inf) > number > wanted.get("above", -inf)


def _sentence(facts: Facts, text: str) -> str:
    """A sentence of a row, with facts, and with keys as the file spells them."""
    return _FILLED_IN.sub(lambda name: str(facts.written(name[1]) if "." in name[1] else getattr(facts, name[1])), text)


def list_rows() -> None:
    """List the rows of `tables/rules.json` as rules."""
    rows: Mapping[str, Mapping[str, Any]] = json.loads((TABLES / "rules.json").read_text(encoding="utf-8"))
    for kind, row in rows.items():
        when = row.get("when", {})
        cases = [{**row, **case, "when": when | case.get("when", {})} for case in row.get("cases", [{}])]

        def find(facts: Facts, cases: Sequence[Mapping[str, Any]] = cases) -> Found:
            for case in cases:
                holds, is_excepted = (
                    [_holds(facts, *each) for each in case.get(part, {}).items()] for part in ("when", "unless")
                )
                if all(holds) and not any(is_excepted):
                    reason, fix = (_sentence(facts, case[part]) for part in ("reason", "fix"))
                    yield case["key"], reason, fix, case.get("severity", "error")

        find.__name__, find.__doc__ = kind.replace("-", "_"), row["source"]
        rule(since=row.get("since", ""), before=row.get("before", ""))(find)


def divisor_below(number: int, limit: int) -> int:
    """The largest divisor of a number that is smaller than the limit, 1 at least."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return max((n for one in small for n in (one, number // one) if n < limit), default=1)


def in_the_way(keys: Mapping[str, tuple[str, object]], reason: str, otherwise: str = "") -> Found:
    """Yield a finding for each key that is in the way: key -> the value that is not, and whether the file's is."""
    for key, (right, is_wrong) in keys.items():
        if is_wrong:
            yield key, reason, f"set {key}: {right}{otherwise}"
