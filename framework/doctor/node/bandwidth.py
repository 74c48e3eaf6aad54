"""Judgement of what `framework.engine.link_bench` has measured: slow hosts and slow links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from framework.doctor.node.findings import Check, warning
from framework.errors import Problem

# A host is slow if its best link has less than this share of the usual speed; links of equal hosts
# differ by a few percent.
_SLOW_SHARE: Final = 0.6
_GB: Final = 1e9


def judge(result: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the measurements as rows of a table, with slow hosts and links as warnings.

    `result`: as `framework/engine/link_bench.py` prints it.
    """
    for row in result["all_reduce"]:
        took = f"{row['bytes'] >> 20} MiB in {row['seconds'] * 1e3:.2f} ms"
        outcome = f"{took}: algorithm {_speed(row['algorithm'])}, bus {_speed(row['bus'])}"
        yield Check("all-reduce", outcome, facts={"all_reduce": row})
    if result["pairs"]:
        yield _check_pairs(result["pairs"])
    for row in result["storage"]:
        if "error" in row:
            problem = Problem(
                "storage-bench-failed", row["error"], "make room there", file=f"node {row['host']}"
            )
            yield Check("storage", f"{row['host']}: not measured", [problem])
        else:
            outcome = (
                f"{row['host']}: writes {_speed(row['write'])} with fsync, reads "
                f"{_speed(row['read'])}"
            )
            yield Check("storage", outcome, facts={"storage": row})


def _check_pairs(rows: Sequence[Mapping[str, Any]]) -> Check:
    """Find slow hosts, which are slow with all others, and slow links, which are one pair each.

    `rows`: each with hosts ``a`` and ``b``, and ``bytes_per_second`` each way.
    """
    slow_hosts = _slow_hosts(_best_speeds(rows))
    typical = median(row["bytes_per_second"] for row in rows)
    outcome = f"{len(rows)} measured, {_speed(typical)} each way"
    if len(rows) > 1:
        slowest = min(rows, key=lambda row: float(row["bytes_per_second"]))
        speed = _speed(slowest["bytes_per_second"])
        outcome += f"; slowest {slowest['a']} and {slowest['b']}: {speed}"
    problems = list(slow_hosts.values())
    for row in rows:
        is_slow = row["bytes_per_second"] < _SLOW_SHARE * typical
        if is_slow and slow_hosts.keys().isdisjoint((row["a"], row["b"])):
            problems.append(_slow_link(row, typical))
    return Check("pairs", outcome, problems, {"pairs": list(map(dict, rows))})


def _best_speeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the speed of each host's best link."""
    best: dict[str, float] = {}
    for row in rows:
        for name in (row["a"], row["b"]):
            best[name] = max(best.get(name, 0.0), row["bytes_per_second"])
    return best


def _slow_hosts(best: Mapping[str, float]) -> dict[str, Problem]:
    """Return a warning for each slow host; `best`: speed of each host's best link."""
    usual = median(best.values())
    problems = {}
    for name, speed in best.items():
        if speed < _SLOW_SHARE * usual:
            reason = f"with none of the others it gets more, and they get {_speed(usual)}"
            fix = "look at its cable, its switch port and its driver, or leave it out"
            problems[name] = warning(
                "slow-node", reason, fix, "bandwidth", _speed(speed), f"node {name}"
            )
    return problems


def _slow_link(row: Mapping[str, Any], typical: float) -> Problem:
    reason = f"pairs usually get {_speed(typical)}"
    fix = "look at the way between the two"
    speed = _speed(row["bytes_per_second"])
    return warning("slow-link", reason, fix, f"to {row['b']}", speed, f"node {row['a']}")


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GB:.2f} GB/s"
