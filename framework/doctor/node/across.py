"""Findings that only show when nodes are compared. Pure functions over the facts of each node: `doctor` and the node
agents share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from framework.doctor.node.findings import Check
from framework.errors import Problem, Severity
from framework.launch.hosts.hostfile import most_common, node_names

Facts = Mapping[str, Any]
# Beyond the first, logs of nodes cannot be read together; beyond the second, tokens and file times break.
_CLOCK_WARN_SECONDS: Final = 2.0
_CLOCK_REFUSE_SECONDS: Final = 60.0
_MUST_BE_EQUAL: Final = frozenset({"torch", "deepspeed", "dsf-trainer", "nccl"})


def compare(nodes: Mapping[str, Facts]) -> list[Check]:
    """All comparisons of facts.

    Args:
        nodes: name of each node -> its facts, node 0 first; at least one.
    """
    return [_versions(nodes), _code(nodes), _devices(nodes), _variables(nodes)]


def python_release(version: str) -> str:
    """Return the part of a Python version that has to be equal: 3.11 of 3.11.7."""
    return ".".join(version.split(".")[:2])


def compare_clocks(offsets: Mapping[str, float]) -> Check:
    """Clocks, as seconds by which each node is ahead of whoever measured; an error of a network round trip is expected.

    The middle one is right; between two, node 0, the first.
    """
    middle = sorted(offsets.values())[len(offsets) // 2] if len(offsets) > 2 else next(iter(offsets.values()))
    apart = {name: offset - middle for name, offset in offsets.items()}
    problems = []
    for name, seconds in apart.items():
        if abs(seconds) >= _CLOCK_WARN_SECONDS:
            severity: Severity = "error" if abs(seconds) >= _CLOCK_REFUSE_SECONDS else "warning"
            problems.append(
                Problem(
                    kind="clock-differs",
                    file=f"node {name}",
                    key="clock",
                    severity=severity,
                    fix="start chrony or ntpd there",
                    reason=f"it is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the other nodes",
                )
            )
    return Check("clocks", f"{max(apart.values()) - min(apart.values()):.1f} s apart", tuple(problems))


def _versions(nodes: Mapping[str, Facts]) -> Check:
    tables = {name: facts.get("versions", {}) for name, facts in nodes.items()}
    problems: list[Problem] = []
    for package in sorted({package for table in tables.values() for package in table}):
        severity: Severity = "error" if package in _MUST_BE_EQUAL else "warning"
        values = {name: table.get(package, "none") for name, table in tables.items()}
        if package == "python" and len({python_release(str(value)) for value in values.values()}) > 1:
            severity = "error"
        problems += _outliers(
            values,
            kind="versions-differ",
            key=package,
            severity=severity,
            fix="install the same everywhere, best from one image or constraints.txt",
        )
    return Check("versions", "equal" if not problems else "differ", tuple(problems))


def _code(nodes: Mapping[str, Facts]) -> Check:
    """The run config, the framework and the user's own modules."""
    configs = {name: facts.get("config", "") for name, facts in nodes.items()}
    problems = list(
        _outliers(configs, kind="config-differs", key="run config", fix="give every node the same file and settings")
    )
    tables = {name: facts.get("code", {}) for name, facts in nodes.items()}
    for module in sorted({module for table in tables.values() for module in table}):
        values = {name: table.get(module, "not there") for name, table in tables.items()}
        problems += _outliers(values, kind="code-differs", key=module, fix="bring the same code to every node")
    return Check("config and code", "equal" if not problems else "differ", tuple(problems))


def _devices(nodes: Mapping[str, Facts]) -> Check:
    problems = [
        problem
        for key, kind in (("device", "devices-differ"), ("slots", "slots-differ"))
        for problem in _outliers(
            {name: facts.get(key) for name, facts in nodes.items()},
            kind=kind,
            key=key,
            fix="give every host the same number and kind of devices",
        )
    ]
    models = {name: ", ".join(facts.get("gpu_names", ())) for name, facts in nodes.items()}
    problems += _outliers(
        models, kind="gpus-differ", key="GPU", severity="warning", fix="the slowest sets the pace; use equal GPUs"
    )
    owner: dict[str, str] = {}
    for name, facts in nodes.items():
        for uuid in facts.get("gpus", ()):
            if owner.setdefault(uuid, name) != name:
                problems.append(
                    Problem(
                        kind="gpu-shared",
                        file=f"node {name}",
                        key="GPU",
                        value=uuid,
                        reason=f"node {owner[uuid]} uses the same one",
                        fix="give every node devices of its own",
                    )
                )
    count = len(owner)
    stated = f"{count} different GPUs" if count and not problems else "equal" if not problems else "differ"
    return Check("devices", stated, tuple(problems))


def _variables(nodes: Mapping[str, Facts]) -> Check:
    tables = {name: facts.get("variables", {}) for name, facts in nodes.items()}
    problems: list[Problem] = []
    for variable in sorted({variable for table in tables.values() for variable in table}):
        values = {name: table.get(variable, "not set") for name, table in tables.items()}
        problems += _outliers(
            values, kind="variables-differ", key=variable, severity="warning", fix="set it alike everywhere"
        )
    return Check("variables", "equal" if not problems else "differ", tuple(problems))


def _outliers(
    values: Mapping[str, Any], *, kind: str, key: str, fix: str, severity: Severity = "error"
) -> Iterator[Problem]:
    """A problem for each node that is not like most of them; between two, node 0 is right."""
    usual = most_common(values.values())
    alike = [name for name, value in values.items() if value == usual]
    for name, value in values.items():
        if value != usual:
            yield Problem(
                kind=kind,
                file=f"node {name}",
                key=key,
                value=value,
                severity=severity,
                fix=fix,
                reason=f"{node_names(alike)} {'has' if len(alike) == 1 else 'have'} {usual}",
            )
