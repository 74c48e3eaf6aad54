"""``doctor --bench``: how fast ranks talk and hosts write, measured by `framework.engine.link_bench`, and who is
slow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from framework.doctor.hosts import HostFailed, Remote, Start, each_of, member_command, variables
from framework.doctor.node.findings import Check
from framework.doctor.node.need import Need
from framework.errors import Problem
from framework.launch.hosts.hostfile import Host
from framework.system.ports import free_port

_BENCH_SECONDS: Final = 180.0
# A host whose best partner gets less than this share of what others get is slow; links of equal hosts differ by a few
# percent.
_SLOW_SHARE: Final = 0.6
_GB: Final = 1e9

Result = Mapping[str, Any]


def bench(
    hosts: Sequence[Host], need: Need, *, master: str, port: int, start: Start = member_command
) -> tuple[Check, ...]:
    """Run the job on every rank of the run, on this machine or on all hosts; a few seconds, three minutes at most.

    Args:
        hosts: none: this machine.
        need: how many ranks each host has, and where checkpoints go.
        master: with hosts, the address of the first one.
        port: with hosts, where node 0 listens.
        start: the command that starts a member on a host.
    """
    chosen = hosts or (Host("localhost", need.cluster.devices_per_host),)
    place = [master, port] if hosts else ["127.0.0.1", free_port()]
    folder = str(need.checkpoints) if need.checkpoints else None
    order = {
        "do": "bench",
        "variables": variables(),
        "cluster": asdict(need.cluster),
        "master": place,
        "folder": folder,
        "seconds": _BENCH_SECONDS,
    }
    with ExitStack() as stack:
        remotes = [Remote(host, start(host) if hosts else member_here()) for host in chosen]
        for remote in remotes:
            stack.callback(remote.close)
        numbers = {each: number for number, each in enumerate(remotes)}
        try:
            answers = each_of(
                remotes, lambda each: each.ask(order | {"node": numbers[each]}, seconds=_BENCH_SECONDS + 30)
            )
        except HostFailed as error:
            return (_failed(str(error)),)
    failed = [
        f"{each.name}: {answer['reason']}" for each, answer in zip(remotes, answers, strict=True) if answer["reason"]
    ]
    result = next((answer["result"] for answer in answers if answer["result"]), None)
    if failed or result is None:
        return (_failed("; ".join(failed) or "no rank told its result"),)
    return tuple(judge(result))


def member_here() -> list[str]:
    """The member on this machine."""
    return [sys.executable, "-m", "framework.doctor.member"]


def judge(result: Result) -> Iterator[Check]:
    """Rows for a person, and who is slow."""
    for row in result["all_reduce"]:
        took = f"{row['bytes'] >> 20} MiB in {row['seconds'] * 1e3:.2f} ms"
        stated = f"{took}: algorithm {_speed(row['algorithm'])}, bus {_speed(row['bus'])}"
        yield Check("all-reduce", stated, (), {"all_reduce": row})
    if result["pairs"]:
        yield _pairs(result["pairs"])
    for row in result["storage"]:
        if "error" in row:
            problem = Problem(
                kind="storage-bench-failed", file=f"node {row['host']}", reason=row["error"], fix="make room there"
            )
            yield Check("storage", f"{row['host']}: not measured", (problem,))
        else:
            stated = f"{row['host']}: writes {_speed(row['write'])} with fsync, reads {_speed(row['read'])}"
            yield Check("storage", stated, (), {"storage": row})


def _pairs(rows: Sequence[Mapping[str, Any]]) -> Check:
    """A slow host is slow with everybody, a slow link with one."""
    best: dict[str, float] = {}
    for row in rows:
        for name in (row["a"], row["b"]):
            best[name] = max(best.get(name, 0.0), row["bytes_per_second"])
    usual, typical = median(best.values()), median(row["bytes_per_second"] for row in rows)
    slow = [name for name, speed in best.items() if speed < _SLOW_SHARE * usual]
    links = [
        row for row in rows if row["bytes_per_second"] < _SLOW_SHARE * typical and not {row["a"], row["b"]} & {*slow}
    ]
    problems = [
        Problem(
            kind="slow-node",
            file=f"node {name}",
            key="bandwidth",
            value=_speed(best[name]),
            severity="warning",
            reason=f"with none of the others it gets more, and they get {_speed(usual)}",
            fix="look at its cable, its switch port and its driver, or leave it out",
        )
        for name in slow
    ] + [
        Problem(
            kind="slow-link",
            file=f"node {row['a']}",
            key=f"to {row['b']}",
            value=_speed(row["bytes_per_second"]),
            reason=f"pairs usually get {_speed(typical)}",
            fix="look at the way between the two",
            severity="warning",
        )
        for row in links
    ]
    last = min(rows, key=lambda row: float(row["bytes_per_second"]))
    slowest = f"; slowest {last['a']} and {last['b']}: {_speed(last['bytes_per_second'])}" if len(rows) > 1 else ""
    stated = f"{len(rows)} measured, {_speed(typical)} each way{slowest}"
    return Check("pairs", stated, tuple(problems), {"pairs": [dict(row) for row in rows]})


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GB:.2f} GB/s"


def _failed(reason: str) -> Check:
    problem = Problem(
        kind="bench-failed",
        key="--bench",
        reason=reason,
        fix="run doctor without --bench first: it names what is wrong",
    )
    return Check("bench", "not finished", (problem,))
