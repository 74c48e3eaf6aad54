"""Findings of the preflight: a `Check` for each thing that was examined on one node, with its
`Problem`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from framework.errors import Problem, counted

Status = Literal["ok", "note", "warning", "error"]
_WORST_FIRST: Final[tuple[Status, ...]] = ("error", "warning", "note", "ok")
_WIDTH: Final = 16
MIB: Final = 1 << 20
GIB: Final = 1 << 30
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
warning = partial(Problem, severity="warning")
"""A problem that does not stand in the way of a start."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `stated` for a person, `facts` in plain values to compare with
    other nodes'.
    """

    name: str
    stated: str
    problems: Sequence[Problem] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Status of the worst problem."""
        return min((each.severity for each in self.problems), key=_WORST_FIRST.index, default="ok")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them."""
        problems = [each.to_dict() for each in self.problems]
        return self.summary() | {"facts": dict(self.facts), "problems": problems}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Check:
        """Build a check from what `to_dict` wrote on another node."""
        problems = tuple(map(Problem.from_dict, values["problems"]))
        return Check(str(values["name"]), str(values["found"]), problems, dict(values["facts"]))

    def summary(self) -> dict[str, Any]:
        """Return what was looked at, and how it is."""
        return {"name": self.name, "status": self.status, "found": self.stated}

    def as_row(self, *, indent: str = "  ") -> str:
        """The same as a line of a table."""
        return f"{indent}{self.status:<8} {self.name:<{_WIDTH}} {self.stated}"


@dataclass(frozen=True)
class Node:
    """One host, and everything that was looked at there; `seconds`: how long that took."""

    name: str
    checks: Sequence[Check]
    seconds: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """Of all checks together."""
        return {name: value for check in self.checks for name, value in check.facts.items()}

    @property
    def problems(self) -> list[Problem]:
        """Of all checks, each naming this node as its place."""
        return [
            replace(each, file=f"node {self.name}")
            for check in self.checks
            for each in check.problems
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        checks = list(map(Check.summary, self.checks))
        return {
            "node": self.name,
            "seconds": round(self.seconds, 3),
            "checks": checks,
            "facts": self.facts,
        }


@dataclass(frozen=True)
class Report:
    """Everything that one preflight found: config and hostfile; the machines; what they are
    together; their speed.
    """

    before: Sequence[Check] = ()
    nodes: Sequence[Node] = ()
    across: Sequence[Check] = ()
    measured: Sequence[Check] = ()

    @property
    def problems(self) -> list[Problem]:
        """All of them, in the order in which they are shown."""
        parts: tuple[Check | Node, ...] = (*self.before, *self.nodes, *self.across, *self.measured)
        return [each for part in parts for each in part.problems]

    @property
    def is_fine(self) -> bool:
        """Check whether nothing stands in the way of a start."""
        return not any(each.severity == "error" for each in self.problems)

    def as_text(self) -> str:
        """Tables for a person: what was looked at (of several nodes: what is not fine), problems
        with fixes, the verdict.
        """
        lines = [check.as_row(indent="") for check in self.before]
        for node in self.nodes:
            if len(self.nodes) == 1:
                shown = node.checks
            else:
                shown = [each for each in node.checks if each.status != "ok"]
            if len(self.nodes) > 1:
                fine = f", {len(node.checks) - len(shown)} of {len(node.checks)} fine"
            else:
                fine = ""
            lines += [
                f"node {node.name}, looked at in {node.seconds:.1f} s{fine}",
                *map(Check.as_row, shown),
            ]
        for title, checks in (("across nodes", self.across), ("measured", self.measured)):
            lines += [title, *map(Check.as_row, checks)] if checks else []
        problems = sorted(self.problems, key=lambda each: _WORST_FIRST.index(each.severity))
        if problems:
            lines += ["", *(f"{each.severity}: {each}" for each in problems)]
        severities = [each.severity for each in problems]
        counts = [
            counted(severities.count(name), name) for name in _WORST_FIRST if name in severities
        ]
        verdict = "fit to train" if self.is_fine else "not fit to train"
        return "\n".join([*lines, "", f"{verdict}{': ' if counts else ''}{', '.join(counts)}"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ok": self.is_fine,
            "findings": list(map(_finding, self.problems)),
            "before": list(map(Check.summary, self.before)),
            "nodes": list(map(Node.to_dict, self.nodes)),
            "across": list(map(Check.summary, self.across)),
            "measured": [each.summary() | dict(each.facts) for each in self.measured],
        }


def _finding(problem: Problem) -> dict[str, Any]:
    """Build the record for tools; `node` is empty where it is about none in particular."""
    found = problem.to_dict()
    if "value" in found:
        subject = f"{problem.key} = {found['value']}: "
    elif problem.key:
        subject = f"{problem.key}: "
    else:
        subject = ""
    if problem.file.startswith("node "):
        node = problem.file.removeprefix("node ")
    else:
        node = ""
    return {
        "id": problem.kind,
        "severity": problem.severity,
        "node": node,
        "found": f"{subject}{problem.reason}",
        "fix": problem.fix,
        "text": str(problem),
    }


def size_text(num_bytes: float) -> str:
    """``512 MiB``, ``1.5 GiB``: two or three digits, in powers of 1024."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes = num_bytes / 1024
        unit = unit + 1
    if num_bytes >= 100 or num_bytes == int(num_bytes):
        digits = 0
    else:
        digits = 1
    return f"{num_bytes:.{digits}f} {_UNITS[unit]}"
