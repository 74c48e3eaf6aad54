"""Parts of every rule: its kind and severity, and how what it finds becomes a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from operator import attrgetter
from typing import Final

from framework.config.run_config import RunConfig
from framework.errors import Problem, Severity
from framework.plan.cluster import Cluster

Rule = Callable[[RunConfig, Cluster], Iterator[Problem]]
# Key, reason and fix; a whole problem where its kind or its value is not the rule's.
Found = Iterator[tuple[str, str, str] | Problem]
LISTED: Final[list[Rule]] = []


def rule(kind: str = "", severity: Severity = "error") -> Callable[[Callable[[RunConfig, Cluster], Found]], Rule]:
    """List a function as a rule: its findings become problems of this kind, with the value that their key has."""

    def listed(find: Callable[[RunConfig, Cluster], Found]) -> Rule:
        @wraps(find)
        def check(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
            for found in find(config, cluster):
                if not isinstance(found, Problem):
                    key, reason, fix = found
                    found = Problem(kind, reason, fix, key, attrgetter(key)(config), severity=severity)
                yield found

        LISTED.append(check)
        return check

    return listed
