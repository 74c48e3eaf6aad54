"""Parts of every rule: a function from `Facts` to problems, and three constructors of problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from math import isqrt

from framework.dslint.facts import Facts
from framework.errors import Problem, Severity

Rule = Callable[[Facts], Iterator[Problem]]


def error(facts: Facts, kind: str, key: str, reason: str, fix: str) -> Problem:
    """DeepSpeed refuses the config or breaks on it."""
    return _problem(facts, kind, key, reason, fix, "error")


def warning(facts: Facts, kind: str, key: str, reason: str, fix: str) -> Problem:
    """DeepSpeed takes the config and does something else than it says."""
    return _problem(facts, kind, key, reason, fix, "warning")


def note(facts: Facts, kind: str, key: str, reason: str, fix: str) -> Problem:
    """Right or wrong depends on code outside the JSON."""
    return _problem(facts, kind, key, reason, fix, "note")


def divisor_below(number: int, limit: int) -> int:
    """The largest divisor of a number that is smaller than the limit, 1 at least."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return max((n for one in small for n in (one, number // one) if n < limit), default=1)


def _problem(facts: Facts, kind: str, key: str, reason: str, fix: str, severity: Severity) -> Problem:
    return Problem(kind=kind, key=facts.written(key), value=facts.raw(key), reason=reason, fix=fix, severity=severity)


def holds(*, since: str = "", before: str = "") -> Callable[[Rule], Rule]:
    """A rule of some releases only: from `since` on, and only until the release that `before` names."""

    def bounded(rule: Rule) -> Rule:
        @wraps(rule)
        def in_its_releases(facts: Facts) -> Iterator[Problem]:
            if (not since or facts.since(since)) and not (before and facts.since(before)):
                yield from rule(facts)

        return in_its_releases

    return bounded
