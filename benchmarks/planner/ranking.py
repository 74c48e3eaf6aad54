"""Estimated against measured order of eight strategies of a small GPT on two CPU ranks.

    python -m benchmarks.planner.ranking [--seconds 180] [--out
    benchmarks/results/planner_ranking.json]

First the machine is measured, as `plan --measure` does. Then one job holds an engine for every ZeRO
stage with micro-batches of 4 and of 16 samples, 32 in a step, and they take turns after every step,
so that what else the machine does meets them alike. Printed and written: both times of each, the
rank correlation (Spearman) of their orders, and how much longer the strategy that the estimate puts
first takes than the fastest; by the median of all steps, and by the quickest tenth, which other
work on the machine has met least.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import records
from framework.commands.measure import measure_machine
from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.devices import Machine
from framework.plan.plan import Plan, make_plan
from framework.plan.time import estimate_time
from framework.plan.work import named_work

RANKS = 2
STAGES = range(4)
MICRO_SIZES = (4, 16)
_WARM_UP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="about how long the strategies take turns"
    )
    parser.add_argument("--out", default=str(records.RESULTS / "planner_ranking.json"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        take_turns(Path(arguments.job), seconds=arguments.seconds)
        return
    load_before = records.load_average()
    rates = measure_machine(RANKS)
    machine = Machine.from_measured(rates, devices_per_host=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "steps.json")
        records.launch(
            "-m",
            "benchmarks.planner.ranking",
            "--job",
            str(path),
            "--seconds",
            str(arguments.seconds),
            num_ranks=RANKS,
            timeout_seconds=3 * arguments.seconds + 300,
        )
        steps: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    strategies = []
    for plan in plans():
        name = name_of(plan)
        strategies.append(
            {
                "settings": name,
                "estimate_seconds": estimate(plan, machine),
                "median_seconds": quantile(steps[name], 0.5),
                "tenth_seconds": quantile(steps[name], 0.1),
                "steps": len(steps[name]),
            }
        )
    described = records.machine()
    described["load_average_before"] = load_before
    described["load_average_after"] = records.load_average()
    results = {
        "machine": described,
        "rates": {key: value for key, value in rates.items() if key != "details"},
        **compared(strategies),
        "strategies": strategies,
    }
    print(json.dumps(results, indent=2))
    records.write(results, Path(arguments.out))


def plans(stages: Sequence[int] = STAGES, micro_sizes: Sequence[int] = MICRO_SIZES) -> list[Plan]:
    """Return plans of a small GPT at each ZeRO stage with each micro-batch."""
    return [_plan(stage, micro_size) for stage, micro_size in product(stages, micro_sizes)]


def _plan(stage: int, micro_size: int) -> Plan:
    config: dict[str, Any] = {
        "model": {"kind": "gpt", "size": "tiny", "num_layers": 4},
        "data": {"kind": "text", "sequence_length": 64},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": 32, "micro_size": micro_size},
        "zero": {"stage": stage, "reduce_bucket_size": 1_000_000},
        "training": {"max_steps": 20},
    }
    return make_plan(config_from_values(config), Cluster(devices_per_host=RANKS, device="cpu"))


def name_of(plan: Plan) -> str:
    """Return the settings in which the plans differ."""
    return f"zero.stage: {plan.config.zero.stage}, batch.micro_size: {plan.layout.micro_size}"


def estimate(plan: Plan, machine: Machine) -> float:
    """Return the estimated seconds of a step."""
    work = named_work(plan.config, 1, device="cpu")
    assert work is not None
    return estimate_time(plan, work, machine).total


def take_turns(path: Path, *, seconds: float) -> None:
    """Step all engines in turn; rank 0 writes the seconds that every step took on the slowest rank.
    Collective.
    """
    from framework.engine.distributed import barrier, device, gather, process_group, rank
    from framework.engine.link_bench import timed
    from framework.engine.plain_engine import build_engine
    from framework.engine.random_state import seed_everything
    from framework.setup.components import make_train_loader
    from framework.setup.prepare_run import prepare

    with process_group(None):
        steps: dict[str, list[float]] = {}
        sides = []
        for plan in plans():
            prepared = prepare(plan.config)
            seed_everything(0)
            engine = build_engine(
                prepared.plan,
                ds_config=prepared.ds_config,
                model=prepared.parts.build_model(),
                task=prepared.parts.task,
            )
            batches = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank()).stream(0)
            times = steps.setdefault(name_of(plan), [])
            sides.append((times, partial(engine.train_step, batches)))
        end = time.monotonic() + seconds
        while min(gather(time.monotonic())) < end:
            for times, step in sides:
                barrier()
                times.append(max(gather(timed(step, device(), repeats=1))))
        if rank() == 0:
            measured = {name: times[_WARM_UP_STEPS:] for name, times in steps.items()}
            path.write_text(json.dumps(measured))
        barrier()
        os._exit(0)  # DeepSpeed's engines of several strategies cannot be closed one by one


def quantile(seconds: Sequence[float], share: float) -> float:
    """Return the value below which this share of the seconds lies."""
    return sorted(seconds)[int(share * len(seconds))]


def compared(strategies: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the agreement of the two orders, by medians and by fastest tenths."""
    estimates = [strategy["estimate_seconds"] for strategy in strategies]
    chosen = estimates.index(min(estimates))
    agreement = {}
    for statistic in ("median", "tenth"):
        measured = [strategy[f"{statistic}_seconds"] for strategy in strategies]
        agreement[statistic] = {
            "spearman": spearman(estimates, measured),
            "chosen_over_fastest": measured[chosen] / min(measured),
        }
    return agreement


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two series; equal values share the mean of their ranks."""
    mean = (len(first) - 1) / 2
    first_ranks = [rank - mean for rank in _ranks(first)]
    second_ranks = [rank - mean for rank in _ranks(second)]
    covariance = sum(left * right for left, right in zip(first_ranks, second_ranks, strict=True))
    first_spread = sum(rank**2 for rank in first_ranks)
    second_spread = sum(rank**2 for rank in second_ranks)
    return float(covariance / (first_spread * second_spread) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


if __name__ == "__main__":
    main()
