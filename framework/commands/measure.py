"""``plan CONFIG --measure``: rates of this machine, found by a short job of as many ranks as the
plan has on one host.

The job, `framework.commands.machine_rates`, is a process of its own, because this half imports no
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

_LONGEST_SECONDS: Final = 180.0
_OF_LAUNCHERS: Final = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def measure(cluster: Cluster) -> list[str]:
    """Measure this machine with a cluster's ranks, keep the result, and return lines for a person.

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
    found = measure_machine(num_ranks)
    try:
        kept = f"kept in {keep(found, num_ranks)}"
    except OSError as error:
        kept = f"not kept, so that no plan will use it: {error}"
    return [*_lines(found, num_ranks), f"          {kept}"]


def environment_of_ranks(num_ranks: int) -> dict[str, str]:
    """This process's environment for ranks that it starts: of no other job, and with cores shared
    as `launch` does.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))} | kept


def measure_machine(num_ranks: int) -> dict[str, Any]:
    """Run the job and return what it found; a TrainingError where it failed."""
    before = {"time_seconds": time.time(), "load_average": os.getloadavg()[0]}
    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        words = [*job, "-m", "framework.commands.machine_rates", str(out)]
        try:
            done = run_child(
                words, environment_of_ranks(num_ranks), longest_seconds=_LONGEST_SECONDS
            )
            if done.returncode == 0:
                found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
                return found | before
            reason = failure_of(done.stderr)
        except NoAnswerError as error:
            reason = str(error)
    raise TrainingError(
        f"--measure: the job of {counted(num_ranks, 'rank')} failed: {reason} [measure-failed]"
    )


def _lines(found: Mapping[str, Any], num_ranks: int) -> Iterator[str]:
    environment = found["details"]["environment"]
    rates = ", ".join(
        f"{name} {rate / 1e12:.3g}" for name, rate in found["flops_per_second"].items()
    )
    yield (
        f"measured  {environment['device']}, {counted(num_ranks, 'rank')} at work at the same time"
    )
    yield f"          matrix products, TFLOP/s of a rank: {rates}"
    yield f"          memory: {found['memory_bytes_per_second'] / 1e9:.1f} GB/s of a rank"
    if found["all_reduce_bytes_per_second"]:
        bandwidth = found["all_reduce_bytes_per_second"]
        latency = found["all_reduce_latency_seconds"]
        yield (
            f"          all-reduce: {bandwidth / 1e9:.2f} GB/s (bus), {latency * 1e6:.0f} µs "
            "for 4 KiB"
        )
    steps = found["step_overhead_by_stage"]
    each = ", ".join(
        f"{1e3 * steps[stage]['seconds']:.1f} at ZeRO {stage}" for stage in sorted(steps)
    )
    yield f"          a step with next to no arithmetic, ms: {each}"
    yield f"          {conditions(found)}{'; measure again at rest' * (found['spread'] > MOST_SPREAD)}"
