"""The preflight before a start on several nodes: each looks at itself, says in its HELLO what it found, and node 0
compares.

    with look_before_start(config, cluster, environment, rank=..., warn=...) as told:     # warns
        hello["look"] = told
    differences({"0 (a)": told, "1 (b)": ...}, seen=set())                                 # on node 0, now and then

What another node said is not trusted to have any shape: `is_look` says whether it can be compared.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.doctor.node.across import compare
from framework.doctor.node.inspect import examine
from framework.doctor.node.links import existing, mark, mark_path
from framework.doctor.node.need import need_of
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan

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
_IN_HELLO: Final = frozenset(
    {
        ("versions-differ", "python"),
        ("versions-differ", "torch"),
        ("versions-differ", "deepspeed"),
        ("config-differs", "run config"),
        ("code-differs", "framework"),
        ("slots-differ", "slots"),
    }
)
_MARK: Final = re.compile(r"\.preflight-[0-9a-f]{16}-[0-9]{1,6}")
# The launcher tells gloo its interface, once it knows which way leads to node 0.
_SETTLED_LATER: Final = "hostname-loopback"
# A store may be there again a minute later: training ends with 74 then, which platforms try again, and not with 78.
_LEFT_TO_TRAINING: Final = frozenset({"run-folder-unwritable", "disk-full"})
_MOST_ENTRIES: Final = 200
_MOST_ERRORS: Final = 20
_LONGEST_TEXT: Final = 4096


@contextmanager
def look_before_start(
    config: RunConfig, cluster: Cluster, environment: Mapping[str, str], *, rank: int, warn: Callable[[Problem], None]
) -> Iterator[dict[str, Any]]:
    """Run the preflight of this node and yield its facts for the handshake, while the nodes meet: its mark in the run
    folder is there so long.

    Args:
        config: of the run.
        cluster: all nodes, and the kind of device here.
        environment: that of the ranks.
        rank: this node's.
        warn: told of whatever does not stand in the way.

    What is wrong with this node is told as well: node 0 then refuses, and every node knows why, instead of waiting for
    this one.
    """
    need = need_of(make_plan(config, cluster))
    node = examine(need, environment)
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
    reported["refused"] = [_brief(problem) for problem in found if problem.severity == "error"][:_MOST_ERRORS]
    folder, token = existing(need.checkpoints or Path.cwd()), secrets.token_hex(8)
    with ExitStack() as stack:
        if need.saves:
            with suppress(OSError):  # that it cannot be written to has been told above
                stack.enter_context(mark(folder, token, rank))
                reported["mark"] = str(mark_path(folder, token, rank))
        yield reported


def _brief(problem: Problem) -> list[str]:
    """Kind, what was found, and the fix."""
    stated = str(replace(problem, file="", fix="")).removesuffix(f" [{problem.kind}]")
    return [problem.kind, stated, problem.fix]


def is_look(reported: object) -> bool:
    """Check whether this is what `look_before_start` yields, and no larger than one of those is."""
    if not isinstance(reported, dict) or any(type(reported.get(name)) is not kind for name, kind in _REPORTED.items()):
        return False
    texts: list[object] = [reported["config"], reported["device"], reported["mark"]]
    for name in ("versions", "code", "variables"):
        texts += [*reported[name].keys(), *reported[name].values()]
    texts += [*reported["gpus"], *reported["gpu_names"]]
    if any(type(each) is not list or len(each) != 3 for each in reported["refused"]):
        return False
    texts += [text for each in reported["refused"] for text in each]
    return len(texts) <= _MOST_ENTRIES and all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in texts)


def differences(nodes: Mapping[str, Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
    """Compare the nodes and return what they must have in common and do not, errors and warnings; looks for the marks
    of the others.

    Args:
        nodes: ``RANK (HOST)`` -> what it told, node 0 first.
        seen: marks that were there the last time, and are not looked for again; those found now are added.
    """
    found = [problem for check in compare(nodes) for problem in check.problems]
    problems = [each for each in found if each.severity != "error" or (each.kind, each.key) not in _IN_HELLO]
    for name, reported in nodes.items():
        problems += [
            Problem(kind=kind, file=f"node {name}", reason=stated, fix=fix) for kind, stated, fix in reported["refused"]
        ]
    here, *others = nodes.items()
    absent = _absent({reported["mark"] for _, reported in others if reported["mark"]}, seen)
    for name, reported in others:
        if reported["mark"] in absent:
            problems.append(
                Problem(
                    kind="run-folder-not-shared",
                    file=f"node {name}",
                    key="run.output_dir",
                    value=str(Path(reported["mark"]).parent),
                    reason=f"what it wrote there is not seen by node {here[0]}",
                    fix="set run.output_dir to a folder that all nodes share: every rank saves its part of a "
                    "checkpoint there",
                )
            )
    return problems


def _absent(marks: set[str], seen: set[str]) -> set[str]:
    """Return the marks that are absent; a folder, which a thousand nodes may share, is listed once at most."""
    absent = {path for path in marks - seen if not _is_seen(path)}
    for folder in {Path(path).parent for path in absent if _is_place_of_mark(path)}:
        with suppress(OSError, ValueError):
            list(folder.iterdir())  # makes NFS look again
    absent = {path for path in absent if not _is_seen(path)}
    seen |= marks - absent
    return absent


def _is_seen(path: str) -> bool:
    with suppress(OSError, ValueError):
        return _is_place_of_mark(path) and Path(path).is_file()
    return False


def _is_place_of_mark(path: str) -> bool:
    """The path comes from another node: nothing else is looked at."""
    return Path(path).is_absolute() and _MARK.fullmatch(Path(path).name) is not None
