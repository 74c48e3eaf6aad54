"""Comparison of nodes, which `doctor` and the node agents share, and the preflight before a start
on several: each node looks at itself (`look_before_start`), says in its HELLO what it found, and
node 0 compares (`differences`). What another node said is not trusted to have any shape: `is_look`
says whether it can be compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.doctor.node.findings import Check, warning
from framework.doctor.node.links import absent, existing, mark, mark_path
from framework.doctor.node.machine import examine
from framework.doctor.node.requirements import requirements_of
from framework.errors import Problem, Severity
from framework.launch.hosts.hostfile import most_common, node_names
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.system.log import print_problem

Facts = Mapping[str, Any]
# Beyond the first, logs of nodes cannot be read together; beyond the second, tokens and file times
# break.
_CLOCK_WARN_SECONDS: Final = 2.0
_CLOCK_REFUSE_SECONDS: Final = 60.0
NOT_SHARED: Final = "run-folder-not-shared"
WHY_SHARED: Final = "every rank saves its part of a checkpoint there"
_MUST_BE_EQUAL: Final = frozenset({"torch", "deepspeed", "dsf-trainer", "nccl"})
# Name -> what it holds; the facts that are compared, and where this node left its mark.
_REPORTED: Final[Mapping[str, type]] = {
    "versions": dict,
    "code": dict,
    "config": str,
    "device": str,
    "slots": int,
    "gpus": list,
    "gpu_names": list,
    "variables": dict,
    "mark": str,
    "refused": list,
}
# The HELLO itself holds these, and they are compared without a preflight as well.
_IN_HELLO: Final = (
    *(("versions-differ", name) for name in ("python", "torch", "deepspeed")),
    ("config-differs", "run config"),
    ("code-differs", "framework"),
    ("slots-differ", "slots"),
)
# The launcher tells gloo its interface, once it knows which way leads to node 0.
_SETTLED_LATER: Final = "hostname-loopback"
# A store may be there again a minute later: training ends with 74 then, which platforms try again,
# and not with 78.
_LEFT_TO_TRAINING: Final = frozenset({"run-folder-unwritable", "disk-full"})
_MOST_ENTRIES: Final = 200
_MOST_ERRORS: Final = 20
_LONGEST_TEXT: Final = 4096


@contextmanager
def look_before_start(
    config: RunConfig,
    cluster: Cluster,
    environment: Mapping[str, str],
    *,
    rank: int,
    warn: Callable[[Problem], None] = print_problem,
) -> Iterator[dict[str, Any]]:
    """Run the preflight of this node and yield its facts for the handshake; its mark in the run
    folder is there so long. What is wrong is told as well: node 0 then refuses, and every node
    knows why.

    Args:
        environment: that of the ranks.
        warn: told of whatever does not stand in the way.
    """
    requirements = requirements_of(make_plan(config, cluster))
    node = examine(requirements, environment)
    found = [
        replace(problem, severity="warning") if problem.kind in _LEFT_TO_TRAINING else problem
        for problem in node.problems
        if problem.kind != _SETTLED_LATER
    ]
    for problem in found:
        warn(problem)
    reported = {name: kind() for name, kind in _REPORTED.items()} | {
        name: node.facts[name] for name in _REPORTED if name in node.facts
    }
    reported["refused"] = [
        [each.kind, str(replace(each, file="", fix="")).removesuffix(f" [{each.kind}]"), each.fix]
        for each in found
        if each.severity == "error"
    ][:_MOST_ERRORS]
    folder = existing(requirements.checkpoints or Path.cwd())
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        if requirements.saves:
            with suppress(OSError):  # that it cannot be written to has been told above
                stack.enter_context(mark(folder, token, rank))
                reported["mark"] = str(mark_path(folder, token, rank))
        yield reported


def is_look(reported: object) -> bool:
    """Check whether this is what `look_before_start` yields, and no larger than one of those is."""
    if not isinstance(reported, dict) or any(
        type(reported.get(name)) is not kind for name, kind in _REPORTED.items()
    ):
        return False
    texts: list[object] = [reported["config"], reported["device"], reported["mark"]]
    for name in ("versions", "code", "variables"):
        texts += [*reported[name].keys(), *reported[name].values()]
    texts += [*reported["gpus"], *reported["gpu_names"]]
    for each in reported["refused"]:
        if type(each) is not list or len(each) != 3:
            return False
        texts += each
    return len(texts) <= _MOST_ENTRIES and all(
        isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in texts
    )


def differences(nodes: Mapping[str, Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
    """Compare the nodes, look for the marks of the others, and return errors and warnings.

    Args:
        nodes: ``RANK (HOST)`` -> what it told, node 0 first.
        seen: marks that are not looked for again; those found now are added.
    """
    found = [problem for check in compare(nodes) for problem in check.problems]
    problems = [
        each for each in found if each.severity != "error" or (each.kind, each.key) not in _IN_HELLO
    ]
    for name, reported in nodes.items():
        problems += [
            Problem(kind, stated, fix, file=f"node {name}")
            for kind, stated, fix in reported["refused"]
        ]
    here, *others = nodes.items()
    own_folder = Path(here[1]["mark"]).parent
    marks = {reported["mark"] for _, reported in others if reported["mark"] and here[1]["mark"]}
    near = {path for path in marks if _is_near(Path(path).parent, own_folder)}
    unseen = (marks - near) | absent(near, seen)
    for name, reported in others:
        if reported["mark"] in unseen:
            reason = f"what it wrote there is not seen by node {here[0]}"
            value = str(Path(reported["mark"]).parent)
            fix = f"set run.output_dir to a folder that all nodes share: {WHY_SHARED}"
            about = f"node {name}"
            problems.append(
                Problem(NOT_SHARED, reason, fix, key="run.output_dir", value=value, file=about)
            )
    return problems


def _is_near(folder: Path, own: Path) -> bool:
    """Check whether a node may be shown this folder: its own run folder, or one above or below,
    which may be missing elsewhere. What another node names is listed nowhere else.
    """
    return folder == own or folder in own.parents or own in folder.parents


def compare(nodes: Mapping[str, Facts]) -> list[Check]:
    """All comparisons of facts, by the name of each node, node 0 first; at least one."""
    owner: dict[str, str] = {}
    found = {
        "versions": list(_versions(nodes)),
        "config and code": list(_code(nodes)),
        "devices": list(_devices(nodes, owner)),
        "variables": list(_variables(nodes)),
    }
    if owner:
        equal = {"devices": f"{len(owner)} different GPUs"}
    else:
        equal = {}
    return [
        Check(name, "differ" if each else equal.get(name, "equal"), each)
        for name, each in found.items()
    ]


def python_release(version: str) -> str:
    """Return the part of a Python version that has to be equal: 3.11 of 3.11.7."""
    return ".".join(version.split(".")[:2])


def compare_clocks(offsets: Mapping[str, float]) -> Check:
    """Clocks, as seconds by which each is ahead of whoever measured. The middle one is right;
    between two, node 0.
    """
    if len(offsets) > 2:
        middle = sorted(offsets.values())[len(offsets) // 2]
    else:
        middle = next(iter(offsets.values()))
    apart = {name: offset - middle for name, offset in offsets.items()}
    problems = []
    fix = "start chrony or ntpd there"
    for name, seconds in apart.items():
        if abs(seconds) >= _CLOCK_WARN_SECONDS:
            problem = Problem if abs(seconds) >= _CLOCK_REFUSE_SECONDS else warning
            reason = (
                f"it is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the "
                "other nodes"
            )
            problems.append(problem("clock-differs", reason, fix, file=f"node {name}", key="clock"))
    return Check("clocks", f"{max(apart.values()) - min(apart.values()):.1f} s apart", problems)


def _versions(nodes: Mapping[str, Facts]) -> Iterator[Problem]:
    fix = "install the same everywhere, best from one image or constraints.txt"
    for package, values in _tables(nodes, "versions", absent="none"):
        releases = (
            {python_release(str(value)) for _, value in values} if package == "python" else ()
        )
        must_be_equal = package in _MUST_BE_EQUAL or len(releases) > 1
        yield from outliers(
            values,
            "versions-differ",
            package,
            fix,
            severity="error" if must_be_equal else "warning",
        )


def _code(nodes: Mapping[str, Facts]) -> Iterator[Problem]:
    """The run config, the framework and the user's own modules."""
    configs = [(name, facts.get("config", "")) for name, facts in nodes.items()]
    yield from outliers(
        configs, "config-differs", "run config", "give every node the same file and settings"
    )
    for module, values in _tables(nodes, "code", absent="not there"):
        yield from outliers(values, "code-differs", module, "bring the same code to every node")


def _devices(nodes: Mapping[str, Facts], owner: dict[str, str]) -> Iterator[Problem]:
    """`owner`: GPU -> the first node that has it, filled here."""
    for key, kind in (("device", "devices-differ"), ("slots", "slots-differ")):
        values = [(name, facts.get(key)) for name, facts in nodes.items()]
        yield from outliers(
            values, kind, key, "give every host the same number and kind of devices"
        )
    models = [(name, ", ".join(facts.get("gpu_names", ()))) for name, facts in nodes.items()]
    fix = "the slowest sets the pace; use equal GPUs"
    yield from outliers(models, "gpus-differ", "GPU", fix, severity="warning")
    for name, facts in nodes.items():
        for uuid in facts.get("gpus", ()):
            if owner.setdefault(uuid, name) != name:
                reason = f"node {owner[uuid]} uses the same one"
                fix = "give every node devices of its own"
                yield Problem("gpu-shared", reason, fix, key="GPU", value=uuid, file=f"node {name}")


def _variables(nodes: Mapping[str, Facts]) -> Iterator[Problem]:
    for variable, values in _tables(nodes, "variables", absent="not set"):
        yield from outliers(
            values, "variables-differ", variable, "set it alike everywhere", severity="warning"
        )


def _tables(
    nodes: Mapping[str, Facts], fact: str, *, absent: str
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Each entry of a fact that is a table, with the value that each node has for it."""
    tables = {name: facts.get(fact, {}) for name, facts in nodes.items()}
    for entry in sorted({entry for table in tables.values() for entry in table}):
        yield entry, [(name, table.get(entry, absent)) for name, table in tables.items()]


def outliers(
    values: Sequence[tuple[str, Any]],
    kind: str,
    key: str,
    fix: str,
    *,
    severity: Severity = "error",
    shown: Callable[[Any, Any], tuple[Any, ...]] = lambda *pair: pair,
) -> Iterator[Problem]:
    """A problem for each node that is not like most of them, or node 0; `shown` makes words for a
    value and the usual one.
    """
    usual = most_common(value for _, value in values)
    alike = [name for name, value in values if value == usual]
    for name, value in values:
        if value != usual:
            its, theirs = shown(value, usual)
            reason = f"{node_names(alike)} {'has' if len(alike) == 1 else 'have'} {theirs}"
            yield Problem(
                kind, reason, fix, key=key, value=its, file=f"node {name}", severity=severity
            )
