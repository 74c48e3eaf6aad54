"""Values that must be the same on every node: the HELLOs of all agents are compared before a rank
starts.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.doctor.node.requirements import config_hash
from framework.doctor.node.software import hash_of_framework, version_of
from framework.doctor.node.start import (
    compare_clocks,
    differences,
    outliers,
    python_release,
)
from framework.errors import Problem
from framework.hosts.hostfile import first_few, node_names

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_ONE_HOSTFILE: Final = "copy one hostfile to every node"
# Keys of a HELLO that must have one value on all nodes, each with its fix.
_SAME: Final = {
    "protocol": "agents of different versions do not understand each other; install the same "
    "everywhere",
    "nnodes": "give every node the same --nnodes, or the same hostfile",
    "spares": "give every node the same --spares",
    "slots": "give every node the same --num_gpus, or the same hostfile",
    "master_port": "give every node the same --master_port",
    "hosts": _ONE_HOSTFILE,
}
_SAME_CONFIG: Final = "start it with the same file and settings everywhere"
_LONGEST_LIST: Final = 4096  # a HELLO is one line, and holds much else
_COUNTED: Final = re.compile(r"[0-9]+ hosts \([0-9a-f]{16}\)")


def node_facts(config: RunConfig) -> dict[str, str]:
    """Return the values that have to be equal on all nodes, by name: versions, config and code."""
    facts = {"python": python_release(platform.python_version())}
    facts |= {name: version_of(name) or "not installed" for name in ("torch", "deepspeed")}
    return facts | {"config": config_hash(config), "code": hash_of_framework()}


def machine_mark() -> str:
    """Return a hash that two agents have in common only if they share the devices of one machine.

    It is of the kernel's boot and its namespaces: containers of one host have mounts of their own.
    Empty where these cannot be read.
    """
    try:
        boot = _BOOT.read_text().strip()
        spaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("net", "pid", "mnt")]
    except OSError:
        return ""
    return hashlib.sha256(" ".join([boot, *spaces]).encode()).hexdigest()[:16]


def disagreements(hellos: Sequence[Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
    """Return everything in which nodes differ; only errors prevent a start.

    A problem that many nodes have is one, with their names.

    Args:
        hellos: node 0's first.
        seen: marks that were found before; those that are found now are added.
    """
    problems = [*_rank_problems(hellos), *_machine_problems(hellos)]
    for name, fix in _SAME.items():
        problems += _differences(hellos, name, [hello[name] for hello in hellos], fix)
    problems += _fact_problems(hellos)
    looked = [hello for hello in hellos if "look" in hello]
    if len({name_of(hello) for hello in looked}) > 1:
        looks = {name_of(hello): hello["look"] for hello in looked}
        offsets = {name_of(hello): hello.get("ahead", 0.0) for hello in looked}
        problems += differences(looks, seen=seen)
        problems += compare_clocks(offsets).problems
    return _grouped_by_problem(problems)


def _fact_problems(hellos: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    names: set[str] = set()
    for hello in hellos:
        names.update(hello["facts"])
    for name in sorted(names):
        fix = _SAME_CONFIG if name == "config" else "install the same on every node"
        values = [hello["facts"].get(name, "nothing") for hello in hellos]
        yield from _differences(hellos, name, values, fix)


def hosts_text(names: Sequence[str]) -> str:
    """Return the hosts of a hostfile for a HELLO; a number and a hash if the list is too long."""
    listed = ",".join(names)
    if len(listed) <= _LONGEST_LIST:
        return listed
    digest = hashlib.sha256(listed.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    return f"{len(names)} hosts ({digest})"


def name_of(hello: Mapping[str, Any]) -> str:
    """Return ``RANK (HOST)``."""
    return f"{hello['node_rank']} ({hello['host']})"


def _rank_problems(hellos: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    by_rank = Counter(hello["node_rank"] for hello in hellos)
    for rank, count in sorted(by_rank.items()):
        if count > 1:
            hosts = [str(hello["host"]) for hello in hellos if hello["node_rank"] == rank]
            absent = sorted(set(range(hellos[0]["nnodes"])) - set(by_rank))
            reason = f"{count} nodes have the same rank"
            if absent:
                reason += f", and rank {absent[0]} is missing"
            fix = "give every node a rank of its own"
            file = first_few(hosts)
            yield Problem(
                "node-rank-duplicate", reason, fix, key="node_rank", value=rank, file=file
            )


def _machine_problems(hellos: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    first: dict[str, Mapping[str, Any]] = {}
    for hello in hellos:
        other = first.setdefault(hello["machine"], hello)
        # Two agents of one rank are one that has come again, or are refused for that.
        if hello["machine"] and other["node_rank"] != hello["node_rank"]:
            reason = (
                f"node {name_of(other)} is on the same machine, and both would take its devices"
            )
            fix = (
                "name each host once, with all its slots; to try several nodes on one machine, "
                "--master_addr 127.0.0.1"
            )
            yield Problem(
                "hostfile-duplicate-host",
                reason,
                fix,
                key="host",
                value=hello["host"],
                file=_node(hello),
            )


def _node(hello: Mapping[str, Any]) -> str:
    return f"node {name_of(hello)}"


def _differences(
    hellos: Sequence[Mapping[str, Any]], name: str, values: Sequence[Any], fix: str
) -> Iterator[Problem]:
    """Yield a problem for each node that differs; `values`: of `name`, in the order of `hellos`."""
    names = [name_of(hello) for hello in hellos]
    pairs = list(zip(names, values, strict=True))
    if name == "hosts":
        return outliers(pairs, "nodes-differ", name, fix, shown=_first_difference)
    return outliers(pairs, "nodes-differ", name, fix)


def _first_difference(hosts: str, usual: str) -> tuple[str, str]:
    """Describe two lists of hosts by the first entries that differ.

    If one of them is empty, or only a number and a hash, both are described by their lengths.
    """
    if not hosts or not usual or _COUNTED.fullmatch(hosts) or _COUNTED.fullmatch(usual):
        return _length_text(hosts), _length_text(usual)
    names = hosts.split(",")
    usual_names = usual.split(",")
    pairs = enumerate(zip_longest(names, usual_names))
    place = next(place for place, pair in pairs if pair[0] != pair[1])
    return _entry_text(names, place), _entry_text(usual_names, place)


def _entry_text(names: Sequence[str], place: int) -> str:
    name = names[place] if place < len(names) else "nothing"
    return f"{name} as number {place + 1}"


def _length_text(hosts: str) -> str:
    if not hosts:
        return "none"
    if _COUNTED.fullmatch(hosts):
        return hosts
    return f"{hosts.count(',') + 1} hosts"


def _grouped_by_problem(problems: Sequence[Problem]) -> list[Problem]:
    """Return one problem for all nodes that have the same: a thousand lines are not readable."""
    groups: dict[Problem, list[str]] = {}
    for problem in problems:
        if problem.file.startswith("node "):
            group = replace(problem, file="")
            node = problem.file.removeprefix("node ")
            groups.setdefault(group, []).append(node)
        else:
            groups.setdefault(problem, [])
    together = []
    for problem, nodes in groups.items():
        if nodes:
            problem = replace(problem, file=node_names(nodes))
        together.append(problem)
    return together
