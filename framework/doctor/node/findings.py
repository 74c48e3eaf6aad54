"""Findings of the preflight: a `Check` for each thing examined on a node, with its `Problem`s."""

from __future__ import annotations

from collections import Counter
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
    """One thing that was examined.

    Attributes:
        outcome: the result, for a user.
        facts: the result in plain values, for a comparison with other nodes.
    """

    name: str
    outcome: str
    problems: Sequence[Problem] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Status of the worst problem."""
        severities = [problem.severity for problem in self.problems]
        return min(severities, key=_WORST_FIRST.index, default="ok")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `from_dict` reads them."""
        problems = [problem.to_dict() for problem in self.problems]
        return self.summary() | {"facts": dict(self.facts), "problems": problems}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Check:
        """Build a check from the values that `to_dict` returned on another node."""
        problems = tuple(map(Problem.from_dict, values["problems"]))
        return Check(str(values["name"]), str(values["found"]), problems, dict(values["facts"]))

    def summary(self) -> dict[str, Any]:
        """Return name, status and result in plain values."""
        return {"name": self.name, "status": self.status, "found": self.outcome}

    def as_row(self, *, indent: str = "  ") -> str:
        """Return the same as a line of a table."""
        return f"{indent}{self.status:<8} {self.name:<{_WIDTH}} {self.outcome}"


@dataclass(frozen=True)
class Node:
    """One host with its checks; `seconds`: how long they took."""

    name: str
    checks: Sequence[Check]
    seconds: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of all checks."""
        facts: dict[str, Any] = {}
        for check in self.checks:
            facts |= check.facts
        return facts

    @property
    def problems(self) -> list[Problem]:
        """Problems of all checks; each names this node as its place."""
        problems = []
        for check in self.checks:
            for problem in check.problems:
                problems.append(replace(problem, file=f"node {self.name}"))
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "node": self.name,
            "seconds": round(self.seconds, 3),
            "checks": list(map(Check.summary, self.checks)),
            "facts": self.facts,
        }


@dataclass(frozen=True)
class Report:
    """Everything that one preflight found.

    Attributes:
        before: checks of the config and the hostfile.
        nodes: the machines.
        across: comparisons of the machines, and their connections.
        measured: their speed.
    """

    before: Sequence[Check] = ()
    nodes: Sequence[Node] = ()
    across: Sequence[Check] = ()
    measured: Sequence[Check] = ()

    @property
    def problems(self) -> list[Problem]:
        """All problems, in the order in which they are shown."""
        parts: list[Check | Node] = list(self.before)
        parts += self.nodes
        parts += self.across
        parts += self.measured
        problems: list[Problem] = []
        for part in parts:
            problems += part.problems
        return problems

    @property
    def is_fine(self) -> bool:
        """True if there is no error, so that a run can start."""
        return not any(problem.severity == "error" for problem in self.problems)

    def as_text(self) -> str:
        """Format the report as tables for a user.

        They contain the checks (of several nodes only those that are not fine), the problems with
        their fixes, and the verdict.
        """
        lines = [check.as_row(indent="") for check in self.before]
        for node in self.nodes:
            lines += self._node_lines(node)
        for title, checks in (("across nodes", self.across), ("measured", self.measured)):
            if checks:
                lines.append(title)
                lines += map(Check.as_row, checks)
        lines += self._problem_lines()
        lines += ["", self._verdict()]
        return "\n".join(lines)

    def _problem_lines(self) -> list[str]:
        """List the problems, the worst first, below an empty line; nothing if there are none."""
        problems = sorted(self.problems, key=lambda problem: _WORST_FIRST.index(problem.severity))
        if not problems:
            return []
        return ["", *(f"{problem.severity}: {problem}" for problem in problems)]

    def _verdict(self) -> str:
        verdict = "fit to train" if self.is_fine else "not fit to train"
        numbers: Counter[str] = Counter(problem.severity for problem in self.problems)
        counts = [counted(numbers[name], name) for name in _WORST_FIRST if numbers[name]]
        if counts:
            verdict += f": {', '.join(counts)}"
        return verdict

    def _node_lines(self, node: Node) -> list[str]:
        title = f"node {node.name}, looked at in {node.seconds:.1f} s"
        shown = node.checks
        if len(self.nodes) > 1:
            shown = [check for check in node.checks if check.status != "ok"]
            title += f", {len(node.checks) - len(shown)} of {len(node.checks)} fine"
        return [title, *map(Check.as_row, shown)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "ok": self.is_fine,
            "findings": list(map(_finding, self.problems)),
            "before": list(map(Check.summary, self.before)),
            "nodes": list(map(Node.to_dict, self.nodes)),
            "across": list(map(Check.summary, self.across)),
            "measured": [check.summary() | dict(check.facts) for check in self.measured],
        }


def _finding(problem: Problem) -> dict[str, Any]:
    """Return the record for tools; `node` is empty if the problem is not about a single one."""
    values = problem.to_dict()
    if "value" in values:
        subject = f"{problem.key} = {values['value']}: "
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
    """Return a size as ``512 MiB`` or ``1.5 GiB``: two or three digits, in powers of 1024."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    if num_bytes >= 100 or num_bytes == int(num_bytes):
        digits = 0
    else:
        digits = 1
    return f"{num_bytes:.{digits}f} {_UNITS[unit]}"
