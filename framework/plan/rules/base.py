"""Parts of every rule: its kind and severity, and how what it finds becomes a problem.

A rule that reads settings only, and computes nothing, is a row of ``rules.json``
(`deepspeed_lint/rows.py`): a key is ``given`` (the config sets it), ``on`` or ``off``, ``above`` or
``below`` a number, or has one of the values of a list; a key that its section lacks is null. In a
sentence ``{zero.stage}`` is that key's value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeGuard

from deepspeed_lint.rows import Finding, Row, cases_of, findings, is_between
from framework.config.base import Section
from framework.config.run_config import AUTO, RunConfig
from framework.errors import Problem, Severity
from framework.plan.cluster import Cluster

Rule = Callable[[RunConfig, Cluster], Iterator[Problem]]
# What a rule finds: key, reason, fix and severity, or a complete problem if its kind or its value
# is not the rule's.
Found = Iterator[Finding | Problem]
LISTED: Final[dict[str, list[Rule]]] = {}
"""Name of a module -> its rules, in order; the rows of ``rules.json`` are of this one."""


def rule(
    kind: str = "", severity: Severity = "error"
) -> Callable[[Callable[[RunConfig, Cluster], Found]], Rule]:
    """List a function as a rule, in `LISTED` under its module: its findings become problems of this
    kind, with the value of their key in the config.
    """

    def listed(find: Callable[[RunConfig, Cluster], Found]) -> Rule:
        @wraps(find)
        def check(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
            for finding in find(config, cluster):
                if isinstance(finding, Problem):
                    yield finding
                    continue
                key, reason, fix, *rest = finding
                level: Severity = rest[0] if rest else severity
                place = _place(config, key)
                value = _plain(attrgetter(place)(config))
                yield Problem(kind, reason, fix, place, value, severity=level)

        LISTED.setdefault(find.__module__, []).append(check)
        return check

    return listed


def is_on(section: Any, name: str) -> TypeGuard[Mapping[str, Any]]:
    """Check whether a section that is passed through to DeepSpeed turns something on; "auto" does
    not, and is refused where it stands.
    """
    return isinstance(section, Mapping) and bool(section.get(name)) and section[name] != "auto"


def _place(config: RunConfig, key: str) -> str:
    """Return a key, or its section where that names an import path, and has no ``kind``."""
    section, _, rest = key.partition(".")
    if rest == "kind" and not hasattr(getattr(config, section), rest):
        return section
    return key


def _value(config: RunConfig, cluster: Cluster, name: str) -> Any:
    """Return the value of a key, or None if its section lacks it; raises AttributeError for a
    section that could not be read.
    """
    if name == "cluster.device":
        return cluster.device
    section, *rest = name.split(".")
    value = getattr(config, section)
    for part in rest:
        value = getattr(value, part, None)
    return value


def _plain(value: Any) -> Any:
    """Return a section as it was written, or the switch that stands for its defaults."""
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True) or True
    return value


def _holds(config: RunConfig, cluster: Cluster, name: str, wanted: Any) -> bool:
    """Check whether a key is as a row of ``rules.json`` wants it (see the module)."""
    if wanted == "given":
        section, _, key = name.partition(".")
        return key in getattr(config, section).model_fields_set
    value = _value(config, cluster, name)
    if isinstance(wanted, list):
        return value in wanted
    if isinstance(wanted, str):
        return (bool(value) and value != AUTO) is (wanted == "on")
    return is_between(value, wanted)


def _finder(cases: list[Row]) -> Callable[[RunConfig, Cluster], Found]:
    """Return a function that finds which cases of a row hold."""

    def find(config: RunConfig, cluster: Cluster) -> Found:
        holds = partial(_holds, config, cluster)
        yield from findings(cases, holds, partial(_value, config, cluster))

    return find


def nearest_divisor(number: int, *, near: int) -> int:
    """Return the divisor of `number` that is nearest to `near`; raises ValueError for 0."""
    near = min(near, number)
    for distance in range(number):
        for divisor in (near - distance, near + distance):
            if divisor > 0 and number % divisor == 0:
                return divisor
    raise ValueError(f"{number} has no divisor")


def read_rows() -> dict[str, Row]:
    """Read ``rules.json``: kind of problem -> row."""
    text = Path(__file__).with_name("rules.json").read_text(encoding="utf-8")
    rows: dict[str, Row] = json.loads(text)
    return rows


def list_rows() -> None:
    """List the rows of ``rules.json`` as rules."""
    for kind, row in read_rows().items():
        find = _finder(cases_of(row))
        find.__name__ = kind.replace("-", "_")
        find.__doc__ = row["source"]
        rule(kind)(find)
