"""``doctor --bench``: how fast ranks talk and hosts write, by `framework.engine.link_bench`, and who is slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from framework.doctor.hosts import DoctorOptions, HostFailed, Remote, ask_all, member_command
from framework.doctor.node.findings import Check, warning
from framework.doctor.node.need import Need
from framework.errors import Problem
from framework.launch.hosts.hostfile import Host
from framework.launch.ssh import passed_on
from framework.system.ports import free_port

_BENCH_SECONDS: Final = 180.0
# A host whose best partner gets less than this share of what others get is slow; links of equal hosts differ by a few
# percent.
_SLOW_SHARE: Final = 0.6
_GB: Final = 1e9

Result = Mapping[str, Any]


def bench(asked: DoctorOptions, need: Need) -> list[Check]:
    """Run the job on every rank of the run, on this machine or on all hosts; a few seconds, three minutes at most."""
    order = {
        "do": "bench",
        "variables": passed_on(os.environ, exports=()),
        "cluster": asdict(need.cluster),
        "master": [asked.addresses[0], asked.master_port] if asked.hosts else ["127.0.0.1", free_port()],
        "folder": str(need.checkpoints) if need.checkpoints else None,
        "seconds": _BENCH_SECONDS,
    }
    here = [sys.executable, "-m", "framework.doctor.member"]
    with ExitStack() as stack:
        remotes = []
        for number, host in enumerate(asked.hosts or [Host("localhost", need.cluster.devices_per_host)]):
            command = member_command(host, ssh_args=asked.ssh_args) if asked.hosts else here
            remotes.append(Remote(host, command, number=number))
            stack.callback(remotes[-1].close)
        try:
            answers = ask_all(remotes, lambda each: order | {"node": each.number}, seconds=_BENCH_SECONDS + 30)
        except HostFailed as error:
            return [_failed(str(error))]
    failed = [
        f"{each.name}: {answer['reason']}" for each, answer in zip(remotes, answers, strict=True) if answer["reason"]
    ]
    result = next((answer["result"] for answer in answers if answer["result"]), None)
    if failed or result is None:
        return [_failed("; ".join(failed) or "no rank told its result")]
    return list(judge(result))


def judge(result: Result) -> Iterator[Check]:
    """Rows for a person, and who is slow."""
    for row in result["all_reduce"]:
        took = f"{row['bytes'] >> 20} MiB in {row['seconds'] * 1e3:.2f} ms"
        stated = f"{took}: algorithm {_speed(row['algorithm'])}, bus {_speed(row['bus'])}"
        yield Check("all-reduce", stated, facts={"all_reduce": row})
    if result["pairs"]:
        yield _pairs(result["pairs"])
    for row in result["storage"]:
        if "error" in row:
            problem = Problem("storage-bench-failed", row["error"], "make room there", file=f"node {row['host']}")
            yield Check("storage", f"{row['host']}: not measured", [problem])
        else:
            stated = f"{row['host']}: writes {_speed(row['write'])} with fsync, reads {_speed(row['read'])}"
            yield Check("storage", stated, facts={"storage": row})


def _pairs(rows: Sequence[Mapping[str, Any]]) -> Check:
    """A slow host is slow with everybody, a slow link with one."""
    best: dict[str, float] = {}
    for row in rows:
        for name in (row["a"], row["b"]):
            best[name] = max(best.get(name, 0.0), row["bytes_per_second"])
    usual, typical = median(best.values()), median(row["bytes_per_second"] for row in rows)
    slow = [name for name, speed in best.items() if speed < _SLOW_SHARE * usual]
    problems = []
    for name in slow:
        reason = f"with none of the others it gets more, and they get {_speed(usual)}"
        fix = "look at its cable, its switch port and its driver, or leave it out"
        file, value = f"node {name}", _speed(best[name])
        problems.append(warning("slow-node", reason, fix, key="bandwidth", value=value, file=file))
    for row in rows:
        if row["bytes_per_second"] < _SLOW_SHARE * typical and not {row["a"], row["b"]} & {*slow}:
            reason, fix = f"pairs usually get {_speed(typical)}", "look at the way between the two"
            file, key, value = f"node {row['a']}", f"to {row['b']}", _speed(row["bytes_per_second"])
            problems.append(warning("slow-link", reason, fix, key=key, value=value, file=file))
    last = min(rows, key=lambda row: float(row["bytes_per_second"]))
    slowest = f"; slowest {last['a']} and {last['b']}: {_speed(last['bytes_per_second'])}" if len(rows) > 1 else ""
    stated = f"{len(rows)} measured, {_speed(typical)} each way{slowest}"
    return Check("pairs", stated, problems, {"pairs": [dict(row) for row in rows]})


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GB:.2f} GB/s"


def _failed(reason: str) -> Check:
    fix = "run doctor without --bench first: it names what is wrong"
    problem = Problem("bench-failed", reason, fix, key="--bench")
    return Check("bench", "not finished", [problem])
