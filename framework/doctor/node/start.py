"""Comparison of nodes, and the preflight before a start on several nodes.

`doctor` and the node agents share the comparison. Before a start each node examines itself
(`look_before_start`) and sends its facts in its HELLO, and node 0 compares them (`differences`).
Facts of another node may have any shape: `Look` checks whether they can be compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Strict, model_validator

from framework.config.run_config import RunConfig
from framework.doctor.node.findings import Check, Node
from framework.doctor.node.links import absent, existing, mark, mark_path
from framework.doctor.node.machine import examine
from framework.doctor.node.requirements import Requirements, requirements_of
from framework.errors import Problem, Severity
from framework.hosts.hostfile import most_common, node_names
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.system.log import print_problem

Facts = Mapping[str, Any]
# Beyond the first limit, logs of nodes cannot be read together; beyond the second, tokens and file
# times break.
_CLOCK_WARN_SECONDS: Final = 2.0
_CLOCK_REFUSE_SECONDS: Final = 60.0
WHY_SHARED: Final = "every rank saves its part of a checkpoint there"
_MUST_BE_EQUAL: Final = frozenset({"torch", "deepspeed", "dsf-trainer", "nccl"})
# The HELLO itself has these facts, so that they are compared without a preflight as well.
_IN_HELLO: Final = (
    ("versions-differ", "python"),
    ("versions-differ", "torch"),
    ("versions-differ", "deepspeed"),
    ("config-differs", "run config"),
    ("code-differs", "framework"),
    ("slots-differ", "slots"),
)
# The launcher sets gloo's interface, once it knows the one that leads to node 0.
_SETTLED_LATER: Final = "hostname-loopback"
# Storage may be there again a minute later: if not, training ends with 74, after which platforms
# try again, and not with 78.
_LEFT_TO_TRAINING: Final = frozenset({"run-folder-unwritable", "disk-full"})
_MOST_ENTRIES: Final = 200
_MOST_ERRORS: Final = 20
_LONGEST_TEXT: Final = 4096


def _check_length(text: str) -> str:
    if len(text) > _LONGEST_TEXT:
        raise ValueError("the text is too long")
    return text


_Text = Annotated[str, AfterValidator(_check_length)]
_Error = Annotated[tuple[_Text, _Text, _Text], Strict(False)]


class Look(BaseModel):
    """Facts of a node that `look_before_start` yields.

    Attributes:
        mark: path of this node's mark in the run folder; empty if it left none.
        refused: errors, each as kind, sentence and fix.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    versions: dict[_Text, _Text]
    code: dict[_Text, _Text]
    config: _Text
    device: _Text
    slots: int
    gpus: list[_Text]
    gpu_names: list[_Text]
    variables: dict[_Text, _Text]
    mark: _Text
    refused: list[_Error]

    @model_validator(mode="after")
    def _check_size(self) -> Look:
        num_texts = 2 * (len(self.versions) + len(self.code) + len(self.variables))
        num_texts += len(self.gpus) + len(self.gpu_names) + 3 * len(self.refused)
        if num_texts > _MOST_ENTRIES:
            raise ValueError("there are too many facts")
        return self


EMPTY_LOOK: Final[Facts] = {
    "versions": {},
    "code": {},
    "config": "",
    "device": "",
    "slots": 0,
    "gpus": [],
    "gpu_names": [],
    "variables": {},
    "mark": "",
    "refused": [],
}


@contextmanager
def look_before_start(
    config: RunConfig,
    cluster: Cluster,
    environment: Mapping[str, str],
    *,
    rank: int,
    warn: Callable[[Problem], None] = print_problem,
) -> Iterator[dict[str, Any]]:
    """Run the preflight of this node, and yield its facts for the handshake.

    They contain the errors: node 0 then refuses the start, and every node gets the reason. This
    node's mark is in the run folder until the end of the block.

    Args:
        config: of the run.
        cluster: all nodes.
        environment: that of the ranks.
        rank: of this node.
        warn: takes every problem that was found.
    """
    requirements = requirements_of(make_plan(config, cluster))
    node = examine(requirements, environment)
    errors: list[list[str]] = []
    for problem in node.problems:
        if problem.kind == _SETTLED_LATER:
            continue
        if problem.kind in _LEFT_TO_TRAINING:
            problem = replace(problem, severity="warning")
        warn(problem)
        if problem.severity == "error":
            sentence = str(replace(problem, file="", fix="")).removesuffix(f" [{problem.kind}]")
            errors.append([problem.kind, sentence, problem.fix])
    reported = reported_facts(node)
    reported["refused"] = errors[:_MOST_ERRORS]
    with left_mark(requirements, rank) as path:
        yield reported | {"mark": path}


def reported_facts(node: Node) -> dict[str, Any]:
    """Return the facts of a node that are compared, without a mark and without errors."""
    reported = dict(EMPTY_LOOK)
    for name in EMPTY_LOOK:
        if name in node.facts:
            reported[name] = node.facts[name]
    return reported


@contextmanager
def left_mark(requirements: Requirements, rank: int) -> Iterator[str]:
    """Leave a node's mark in the run folder during the block, and yield its path.

    The path is empty where the run saves nothing, or the folder cannot be written to.
    """
    folder = existing(requirements.checkpoints or Path.cwd())
    token = secrets.token_hex(8)
    path = ""
    with ExitStack() as stack:
        if requirements.saves:
            with suppress(OSError):
                stack.enter_context(mark(folder, token, rank))
                path = str(mark_path(folder, token, rank))
        yield path


def differences(nodes: Mapping[str, Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
    """Compare the nodes, look for the marks of the others, and return errors and warnings.

    Args:
        nodes: facts by ``RANK (HOST)``, node 0 first.
        seen: marks that are not looked for again; marks that are found now are added.
    """
    problems = []
    for check in compare(nodes):
        for problem in check.problems:
            if problem.severity != "error" or (problem.kind, problem.key) not in _IN_HELLO:
                problems.append(problem)
    for name, reported in nodes.items():
        for kind, sentence, fix in reported["refused"]:
            problems.append(Problem(kind, sentence, fix, file=f"node {name}"))
    return problems + _unshared(nodes, seen)


def _unshared(nodes: Mapping[str, Mapping[str, Any]], seen: set[str]) -> list[Problem]:
    """Look for the marks of the other nodes; the arguments are as in `differences`."""
    name_of_0, *names = nodes
    marks = {name: nodes[name]["mark"] for name in names}
    unseen = unseen_marks(nodes[name_of_0]["mark"], set(marks.values()), seen)
    problems = []
    for name, path in marks.items():
        if path in unseen:
            problems.append(not_shared(name, path, name_of_0=name_of_0))
    return problems


def not_shared(name: str, path: str, *, name_of_0: str) -> Problem:
    """Return the problem of a node whose mark at `path` node 0 does not see."""
    reason = f"what it wrote there is not seen by node {name_of_0}"
    value = str(Path(path).parent)
    fix = f"set run.output_dir to a folder that all nodes share: {WHY_SHARED}"
    file = f"node {name}"
    return Problem(
        "run-folder-not-shared", reason, fix, key="run.output_dir", value=value, file=file
    )


def unseen_marks(own_mark: str, marks: set[str], seen: set[str]) -> set[str]:
    """Return the marks of other nodes that node 0 does not see, and add the others to `seen`.

    None is missing if node 0 left no mark itself. A mark elsewhere than in or near node 0's own
    folder is not looked for, and counts as not seen.
    """
    if not own_mark:
        return set()
    own_folder = Path(own_mark).parent
    others = marks - {""}
    near = {path for path in others if _is_near(Path(path).parent, own_folder)}
    return (others - near) | absent(near, seen)


def _is_near(folder: Path, own: Path) -> bool:
    """Check whether this is the node's own run folder, or one above or below it.

    Such a folder may be missing on other nodes. No other folder that another node names is listed.
    """
    return folder == own or folder in own.parents or own in folder.parents


def compare(nodes: Mapping[str, Facts]) -> list[Check]:
    """Compare the facts of at least one node, by name, node 0 first."""
    owner: dict[str, str] = {}
    comparisons = {
        "versions": list(_versions(nodes)),
        "config and code": list(_code(nodes)),
        "devices": list(_devices(nodes, owner)),
        "variables": list(_variables(nodes)),
    }
    checks = []
    for name, problems in comparisons.items():
        if problems:
            outcome = "differ"
        elif name == "devices" and owner:
            outcome = f"{len(owner)} different GPUs"
        else:
            outcome = "equal"
        checks.append(Check(name, outcome, problems))
    return checks


def python_release(version: str) -> str:
    """Return the part of a Python version that has to be equal: 3.11 of 3.11.7."""
    return ".".join(version.split(".")[:2])


def _wrong_clock(name: str, seconds: float) -> Problem:
    """Return the problem of a node with a clock that is ahead by `seconds`, or behind."""
    severity: Severity = "error" if abs(seconds) >= _CLOCK_REFUSE_SECONDS else "warning"
    direction = "ahead of" if seconds > 0 else "behind"
    return Problem(
        "clock-differs",
        f"it is {abs(seconds):.0f} s {direction} the other nodes",
        "start chrony or ntpd there",
        file=f"node {name}",
        key="clock",
        severity=severity,
    )


def compare_clocks(offsets: Mapping[str, float]) -> Check:
    """Compare clocks with the median one, and two clocks with node 0's.

    Args:
        offsets: by node, the seconds by which its clock is ahead of the clock of the measurement.
    """
    if len(offsets) > 2:
        middle = sorted(offsets.values())[len(offsets) // 2]
    else:
        middle = next(iter(offsets.values()))
    apart = {name: offset - middle for name, offset in offsets.items()}
    problems = []
    for name, seconds in apart.items():
        if abs(seconds) >= _CLOCK_WARN_SECONDS:
            problems.append(_wrong_clock(name, seconds))
    return Check("clocks", f"{max(apart.values()) - min(apart.values()):.1f} s apart", problems)


def _versions(nodes: Mapping[str, Facts]) -> Iterator[Problem]:
    """Yield a problem for each node with another version; an error where all must be equal."""
    fix = "install the same everywhere, best from one image or constraints.txt"
    for package, values in _tables(nodes, "versions", absent="none"):
        severity: Severity = "error" if package in _MUST_BE_EQUAL else "warning"
        if package == "python":
            releases = {python_release(str(value)) for _, value in values}
            if len(releases) > 1:
                severity = "error"
        yield from outliers(values, "versions-differ", package, fix, severity=severity)


def _code(nodes: Mapping[str, Facts]) -> Iterator[Problem]:
    """Compare the run config, the framework and the user's own modules."""
    fix = "give every node the same file and settings"
    yield from outliers(_values(nodes, "config", absent=""), "config-differs", "run config", fix)
    for module, values in _tables(nodes, "code", absent="not there"):
        yield from outliers(values, "code-differs", module, "bring the same code to every node")


def _devices(nodes: Mapping[str, Facts], owner: dict[str, str]) -> Iterator[Problem]:
    """Compare devices; `owner` is filled with the first node of each GPU."""
    for key, kind in (("device", "devices-differ"), ("slots", "slots-differ")):
        fix = "give every host the same number and kind of devices"
        yield from outliers(_values(nodes, key, absent=None), kind, key, fix)
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
    """Yield a warning for each node that has another value of a variable than most."""
    for variable, values in _tables(nodes, "variables", absent="not set"):
        yield from outliers(
            values, "variables-differ", variable, "set it alike everywhere", severity="warning"
        )


def _tables(
    nodes: Mapping[str, Facts], fact: str, *, absent: str
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield each entry of a fact that is a table, with the value that each node has for it."""
    tables = dict(_values(nodes, fact, absent={}))
    for entry in sorted(set().union(*tables.values())):
        yield entry, _values(tables, entry, absent=absent)


def _values(nodes: Mapping[str, Facts], fact: str, *, absent: object) -> list[tuple[str, Any]]:
    """Return the value of a fact for each node, by name."""
    return [(name, facts.get(fact, absent)) for name, facts in nodes.items()]


def outliers(
    values: Sequence[tuple[str, Any]],
    kind: str,
    key: str,
    fix: str,
    *,
    severity: Severity = "error",
    shown: Callable[[Any, Any], tuple[Any, ...]] = lambda *pair: pair,
) -> Iterator[Problem]:
    """Yield a problem for each node that has not the most common value.

    Args:
        values: (node, value), node 0 first.
        kind, key, fix, severity: of the problems.
        shown: takes a value and the most common one, and returns both as they are shown.
    """
    usual = most_common(value for _, value in values)
    alike = [name for name, value in values if value == usual]
    verb = "has" if len(alike) == 1 else "have"
    for name, value in values:
        if value != usual:
            shown_value, shown_usual = shown(value, usual)
            reason = f"{node_names(alike)} {verb} {shown_usual}"
            file = f"node {name}"
            yield Problem(
                kind, reason, fix, key=key, value=shown_value, file=file, severity=severity
            )
