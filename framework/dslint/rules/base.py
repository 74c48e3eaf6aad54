"""Parts of every rule: its kind, severity and releases, and how what it finds becomes a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from math import isqrt
from typing import Final

from framework.dslint.facts import Facts
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


def divisor_below(number: int, limit: int) -> int:
    """The largest divisor of a number that is smaller than the limit, 1 at least."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return max((n for one in small for n in (one, number // one) if n < limit), default=1)


def in_the_way(keys: Mapping[str, tuple[str, object]], reason: str, otherwise: str = "") -> Found:
    """Yield a finding for each key that is in the way: key -> the value that is not, and whether the file's is."""
    for key, (right, is_wrong) in keys.items():
        if is_wrong:
            yield key, reason, f"set {key}: {right}{otherwise}"
