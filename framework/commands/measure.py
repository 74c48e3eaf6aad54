"""``plan CONFIG --measure``: rates of this machine, measured by a short job of as many ranks as the
plan has on one host.

The job, `framework.commands.machine_rates`, is a process of its own, because `plan` imports no
torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from framework.commands.torch_child import NoAnswerError, failure_of, run_child
from framework.errors import TrainingError, UsageError, counted, missing_package
from framework.plan.auto import MOST_SPREAD, conditions
from framework.plan.cluster import Cluster
from framework.plan.measured import keep
from framework.system.parent_watch import FAILURES_VARIABLE

_LONGEST_SECONDS: Final = 180.0
_OF_LAUNCHERS: Final = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def measure(cluster: Cluster) -> list[str]:
    """Measure this machine with a cluster's ranks, keep the result, and return lines to print.
    Blocks for about half a minute, at most `_LONGEST_SECONDS`.

    Raises:
        UsageError: there are several hosts.
        ConfigError: torch or deepspeed is not installed.
        TrainingError: the job failed.
    """
    if cluster.num_hosts > 1:
        raise UsageError(
            "--measure measures this machine alone; give --num_gpus N, the ranks on one host"
        )
    num_ranks = cluster.devices_per_host
    for name in ("torch", "deepspeed"):
        if importlib.util.find_spec(name) is None:
            raise missing_package(name, what="plan --measure")
    rates = measure_machine(num_ranks)
    lines = list(_lines(rates, num_ranks))
    try:
        lines.append(f"          kept in {keep(rates, num_ranks)}")
    except OSError as error:
        lines.append(f"          not kept, so that no plan will use it: {error}")
    return lines


def environment_of_ranks(num_ranks: int) -> dict[str, str]:
    """Return the environment of ranks that this process starts: without the variables of another
    job, and with the cores shared among them as `launch` does.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))} | inherited


def measure_machine(num_ranks: int) -> dict[str, Any]:
    """Run the job and wait; returns its rates, with time and load average before it. TrainingError
    if it fails.
    """
    before = {"time_seconds": time.time(), "load_average": os.getloadavg()[0]}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        failures = Path(folder, "failures.jsonl")
        environment = environment_of_ranks(num_ranks) | {FAILURES_VARIABLE: str(failures)}
        words += ["-m", "framework.commands.machine_rates", str(out)]
        try:
            done = run_child(words, environment, longest_seconds=_LONGEST_SECONDS)
            if done.returncode == 0:
                rates: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
                return rates | before
            reason = failure_of(done.stderr, failures)
        except NoAnswerError as error:
            reason = str(error)
    raise TrainingError(
        f"--measure: the job of {counted(num_ranks, 'rank')} failed: {reason} [measure-failed]"
    )


def _lines(rates: Mapping[str, Any], num_ranks: int) -> Iterator[str]:
    device = rates["details"]["environment"]["device"]
    yield f"measured  {device}, {counted(num_ranks, 'rank')} at work at the same time"
    products = [f"{name} {rate / 1e12:.3g}" for name, rate in rates["flops_per_second"].items()]
    yield f"          matrix products, TFLOP/s of a rank: {', '.join(products)}"
    yield f"          memory: {rates['memory_bytes_per_second'] / 1e9:.1f} GB/s of a rank"
    bandwidth = rates["all_reduce_bytes_per_second"]
    if bandwidth:
        latency = rates["all_reduce_latency_seconds"]
        yield (
            f"          all-reduce: {bandwidth / 1e9:.2f} GB/s (bus), {latency * 1e6:.0f} µs "
            "for 4 KiB"
        )
    steps = []
    for stage, overhead in sorted(rates["step_overhead_by_stage"].items()):
        steps.append(f"{1e3 * overhead['seconds']:.1f} at ZeRO {stage}")
    yield f"          a step with next to no arithmetic, ms: {', '.join(steps)}"
    line = f"          {conditions(rates)}"
    if rates["spread"] > MOST_SPREAD:
        line += "; measure again at rest"
    yield line
