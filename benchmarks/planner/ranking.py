"""Estimated against measured order of eight strategies of a small GPT on two CPU ranks.

    python -m benchmarks.planner.ranking [--rounds 3] [--out benchmarks/results/planner_ranking.json]

First the machine is measured, as `plan --measure` does; then every ZeRO stage with micro-batches of 4 and of 16
samples, 32 in a step, is run in turn through the launcher, as `plan --trials` does. Printed and written: both times of
each, the rank correlation (Spearman) of their orders, and how much longer the strategy that the estimate puts first
takes than the fastest; by the median of all steps, and by the quietest round of each, which other work on the machine
has met least.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import records
from framework.commands.measure import measure_machine
from framework.commands.trials import Trial, measure_trials
from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.devices import Machine
from framework.plan.plan import Plan, make_plan
from framework.plan.time import estimate_time
from framework.plan.work import named_work

RANKS = 2
STAGES = range(4)
MICRO_SIZES = (4, 16)
INTERVALS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each strategy")
    parser.add_argument("--out", default=str(records.RESULTS / "planner_ranking.json"))
    arguments = parser.parse_args()
    before = records.load_average()
    rates = measure_machine(RANKS)
    trials = [trial_of(plan, Machine.from_measured(rates, devices_per_host=RANKS)) for plan in plans()]
    measure_trials(trials, note=lambda line: print(line, file=sys.stderr, flush=True), rounds=arguments.rounds)
    found = {
        "machine": records.machine() | {"load_average_before": before, "load_average_after": records.load_average()},
        "rates": {key: value for key, value in rates.items() if key != "details"},
        **compared(trials),
        "strategies": [trial.to_dict() for trial in trials],
    }
    print(json.dumps(found, indent=2))
    records.write(found, Path(arguments.out))


def plans(stages: Sequence[int] = STAGES, micro_sizes: Sequence[int] = MICRO_SIZES) -> list[Plan]:
    """A small GPT at each ZeRO stage with each micro-batch."""
    return [_plan(stage, micro_size) for stage in stages for micro_size in micro_sizes]


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


def trial_of(plan: Plan, machine: Machine) -> Trial:
    """The plan as a trial, with its estimate for a measured machine."""
    work = named_work(plan.config, 1, device="cpu")
    assert work is not None
    name = f"zero.stage: {plan.config.zero.stage}, batch.micro_size: {plan.layout.micro_size}"
    return Trial(name, plan, estimate_time(plan, work, machine).total)


def compared(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Agreement of the two orders, by medians and by quietest rounds; those that do not run are left out."""
    run = [trial for trial in trials if trial.median_seconds]
    estimates = [trial.estimate_seconds or 0.0 for trial in run]
    first = estimates.index(min(estimates))
    ways = {"median": [median(trial.seconds) for trial in run], "quietest": [quietest(trial.seconds) for trial in run]}
    return {
        way: {"spearman": spearman(estimates, measured), "chosen_over_fastest": measured[first] / min(measured)}
        for way, measured in ways.items()
    }


def quietest(seconds: Sequence[float]) -> float:
    """The least of the medians of each round."""
    rounds = (seconds[at : at + INTERVALS] for at in range(0, len(seconds), INTERVALS))
    return min(map(median, rounds))


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation of two series; equal values share the mean of their ranks."""
    ranks, mean = [_ranks(one), _ranks(other)], (len(one) - 1) / 2
    covariance = sum((first - mean) * (second - mean) for first, second in zip(*ranks, strict=True))
    spreads = [sum((value - mean) ** 2 for value in each) for each in ranks]
    return float(covariance / (spreads[0] * spreads[1]) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


if __name__ == "__main__":
    main()
