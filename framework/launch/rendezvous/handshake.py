"""Values that must be the same on every node: found by comparing the HELLOs of all agents before a
rank starts.
"""

from __future__ import annotations

import hashlib
import math
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
    is_look,
    outliers,
    python_release,
)
from framework.errors import Problem
from framework.launch.hosts.hostfile import first_few, is_host, node_names
from framework.launch.rendezvous.connectivity import is_place

HELLO: Final[Mapping[str, type]] = {
    "protocol": int,
    "job": str,
    "node_rank": int,
    "nnodes": int,
    "spares": int,
    "slots": int,
    "master_port": int,
    "host": str,
    "machine": str,
    "hosts": str,
    "clock": float,
    "facts": dict,
}
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_ONE_HOSTFILE: Final = "copy one hostfile to every node"
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
    """Name -> value of what has to be equal everywhere: versions, config and code."""
    facts = {"python": python_release(platform.python_version())}
    facts |= {name: version_of(name) or "not installed" for name in ("torch", "deepspeed")}
    return facts | {"config": config_hash(config), "code": hash_of_framework()}


def machine_mark() -> str:
    """Return what two agents have in common only where they are on one machine, and share its
    devices: one kernel, and its namespaces. Containers of one host have mounts of their own. Empty
    where that cannot be read.
    """
    try:
        boot = _BOOT.read_text().strip()
        spaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("net", "pid", "mnt")]
    except OSError:
        return ""
    return hashlib.sha256(" ".join([boot, *spaces]).encode()).hexdigest()[:16]


def is_hello(hello: object) -> bool:
    """Check whether an agent sends such a thing; nothing in it steers a terminal."""
    return (
        isinstance(hello, dict)
        and all(type(hello.get(name)) is kind for name, kind in HELLO.items())
        and ("look" not in hello or is_look(hello["look"]))
        and 0 <= hello["node_rank"] < hello["nnodes"] + hello["spares"]
        and is_host(hello["host"])
        and math.isfinite(hello["clock"])
        and isinstance(hello.get("master_addr", ""), str)
        and ("echo" not in hello or is_place(hello["echo"]))
        and all(isinstance(value, str) for value in hello["facts"].values())
        and len(hello["facts"]) <= 100
    )


def disagreements(hellos: Sequence[Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
    """Everything in which nodes differ, each with the node; only errors stand in the way. What many
    have alike is told once.

    Args:
        hellos: node 0's first.
        seen: marks that were found the last time, as `framework.doctor.node.start.differences` has
            it.
    """
    problems = [*_rank_problems(hellos), *_machine_problems(hellos)]
    for name, fix in _SAME.items():
        problems += _differences(hellos, name, [hello[name] for hello in hellos], fix)
    for hello in hellos[1:]:
        # it looks for node 0 at itself, and has asked here only because of its hostfile
        if "master_addr" in hello:
            reason = f"node {name_of(hellos[0])} is not there"
            value = hello["master_addr"]
            fix = f"give every node the same --master_addr, or {_ONE_HOSTFILE}"
            file = f"node {name_of(hello)}"
            problems.append(
                Problem("nodes-differ", reason, fix, key="master_addr", value=value, file=file)
            )
    for fact in sorted({name for hello in hellos for name in hello["facts"]}):
        fix = _SAME_CONFIG if fact == "config" else "install the same on every node"
        problems += _differences(
            hellos, fact, [hello["facts"].get(fact, "nothing") for hello in hellos], fix
        )
    looked = {name_of(hello): hello for hello in hellos if "look" in hello}
    if len(looked) > 1:
        problems += differences({name: hello["look"] for name, hello in looked.items()}, seen=seen)
        problems += compare_clocks(
            {name: hello.get("ahead", 0.0) for name, hello in looked.items()}
        ).problems
    return _together(problems)


def hosts_text(names: Sequence[str]) -> str:
    """The hosts of a hostfile for a HELLO: themselves, or as many as would not fit by number and
    hash.
    """
    listed = ",".join(names)
    if len(listed) <= _LONGEST_LIST:
        return listed
    return (
        f"{len(names)} hosts "
        f"({hashlib.sha256(listed.encode('utf-8', 'backslashreplace')).hexdigest()[:16]})"
    )


def name_of(hello: Mapping[str, Any]) -> str:
    """``RANK (HOST)``."""
    return f"{hello['node_rank']} ({hello['host']})"


def _rank_problems(hellos: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    by_rank = Counter(hello["node_rank"] for hello in hellos)
    for rank, count in sorted(by_rank.items()):
        if count > 1:
            who = first_few([str(hello["host"]) for hello in hellos if hello["node_rank"] == rank])
            absent = sorted(set(range(hellos[0]["nnodes"])) - set(by_rank))
            reason = f"{count} nodes have the same rank" + (
                f", and rank {absent[0]} is missing" if absent else ""
            )
            fix = "give every node a rank of its own"
            yield Problem("node-rank-duplicate", reason, fix, key="node_rank", value=rank, file=who)


def _machine_problems(hellos: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    first: dict[str, Mapping[str, Any]] = {}
    for hello in hellos:
        other = first.setdefault(hello["machine"], hello)
        # Two of one rank are an agent that has come again, or are refused as such.
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
    named = zip(map(name_of, hellos), values, strict=True)
    shown = _first_difference if name == "hosts" else lambda *pair: pair
    return outliers(list(named), "nodes-differ", name, fix, shown=shown)


def _first_difference(hosts: str, usual: str) -> tuple[str, ...]:
    """Lists of hosts are long: the first place at which they differ, where both are there to be
    compared.
    """
    texts = (hosts, usual)
    lists = [text.split(",") for text in texts]
    if "" in texts or any(map(_COUNTED.fullmatch, texts)):
        return tuple(
            text if _COUNTED.fullmatch(text) else f"{text.count(',') + 1} hosts" if text else "none"
            for text in texts
        )
    place = next(place for place, pair in enumerate(zip_longest(*lists)) if pair[0] != pair[1])
    return tuple(f"{(names[place:] or ['nothing'])[0]} as number {place + 1}" for names in lists)


def _together(problems: Sequence[Problem]) -> list[Problem]:
    """One problem for all nodes that have the same one: with a thousand nodes nobody reads a
    thousand lines.
    """
    groups: dict[Problem, list[str]] = {}
    for problem in problems:
        is_of_node = problem.file.startswith("node ")
        group = replace(problem, file="" if is_of_node else problem.file)
        groups.setdefault(group, []).extend(
            [problem.file.removeprefix("node ")] if is_of_node else []
        )
    return [
        replace(problem, file=node_names(nodes)) if nodes else problem
        for problem, nodes in groups.items()
    ]
