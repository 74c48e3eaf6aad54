"""Where the time of a step on one device goes: python -m benchmarks.step_budget [--model NAME ...]
[--profile RUN] [--after RUN]

For GPT-2 (124 million weights), GPT-2 XL and 8 of the 32 blocks of a Llama of 8 billion, trained
whole and by LoRA, it prints the least time of each part of a step: the operations of its products
over the rate of the largest product, the bytes of all else over the memory's rate, as the planner
counts them and as the device was measured (`results/h200_rates.json`) or is listed (`--gpu`). With
`--profile` (one model) it reads a trace, of `profile` in a run config or of torch's profiler, and
puts the time of its kernels beside it, part by part; with `--after` that of a second trace, so that
each millisecond that is gone, or left, has a name. It needs no GPU; a second for each model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.budget.least import HOST, PARTS, Part, least_parts
from benchmarks.budget.trace import Profile, profile_of, read_trace
from benchmarks.loops.cases import MODELS, OPTIMIZER, PRECISION
from benchmarks.records import RESULTS, write
from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.devices import Machine
from framework.plan.parallelism import Parallelism
from framework.plan.plan import Plan, make_plan
from framework.plan.time import estimate_time
from framework.plan.work import work_of


def main() -> None:
    arguments = _arguments()
    machine = Machine.listed(arguments.gpu, devices_per_host=1)
    rates = json.loads(arguments.rates.read_text(encoding="utf-8"))
    if arguments.gpu == rates["gpu"]:
        machine = Machine.from_measured(rates["figures"], machine)
    profiles = []
    for path in (arguments.profile, arguments.after):
        if path is not None:
            profiles.append(profile_of(read_trace(path), num_steps=arguments.steps))
    budgets = {}
    for name in arguments.model:
        budget = budget_of(name, machine, zero_stage=arguments.zero)
        budgets[name] = budget
        print("\n".join(table(name, budget, profiles)))
        print()
    if arguments.out:
        write(
            {
                "gpu": machine.device.name,
                "matmul_flops_per_second": machine.device.matmul_flops_per_second,
                "memory_bytes_per_second": machine.device.memory_bytes_per_second,
                "zero_stage": arguments.zero,
                "models": budgets,
            },
            arguments.out,
        )


def plan_of(name: str, *, zero_stage: int) -> Plan:
    """Return the plan of a model on one GPU, in bf16."""
    values = {
        "run": {"name": "budget"},
        **MODELS[name],
        "precision": PRECISION,
        "optimizer": OPTIMIZER,
        "zero": {"stage": zero_stage},
    }
    values["training"] = {**values.get("training", {}), "max_steps": 100}
    cluster = Cluster(1, 1, "cuda")
    return make_plan(config_from_values(values), cluster)


def budget_of(name: str, machine: Machine, *, zero_stage: int) -> dict[str, Any]:
    """Return the parts of a model's step with their least time, tokens, and the planner's estimate
    of the step, as plain values.
    """
    plan = plan_of(name, zero_stage=zero_stage)
    work = work_of(plan)
    if work is None:
        raise ValueError(f"{name}: the work of this model is not known")
    by = Parallelism.from_plan(plan)
    parts = least_parts(work, by, machine)
    seconds = sum(part.seconds for part in parts if part.is_needed)
    estimate = estimate_time(plan, work, machine)
    return {
        "parts": [asdict(part) for part in parts],
        "num_params": work.num_params,
        "tokens": estimate.num_tokens,
        "least_seconds": seconds,
        "least_tokens_per_second": (estimate.num_tokens or 0) / seconds,
        "estimated_seconds": estimate.total,
    }


def table(name: str, budget: Mapping[str, Any], profiles: Sequence[Profile]) -> list[str]:
    """Return a table in Markdown: a row for each part, with its work, its least milliseconds and
    those of up to two profiles, and the longest kernels of the last one.
    """
    parts = {part["name"]: Part(**part) for part in budget["parts"]}
    heads = ["part", "TFLOP", "GB", "least ms"]
    heads += ["profile ms", "after ms"][: len(profiles)]
    if profiles:
        heads += ["over the least", "longest kernels: number in a step, ms"]
    lines = [
        f"{name}: {budget['tokens']:,} tokens a step",
        "",
        _row(heads),
        _row(["---"] * len(heads)),
    ]
    for part in PARTS:
        if part in parts or any(part in profile.seconds for profile in profiles):
            lines.append(_row(_cells(part, parts.get(part), profiles)))
    whole = ["the step", "", "", f"{1000 * budget['least_seconds']:.1f}"]
    whole += [f"{1000 * profile.step_seconds:.1f}" for profile in profiles]
    if profiles:
        over = profiles[-1].step_seconds - budget["least_seconds"]
        whole += [f"{1000 * over:+.1f}", ""]
    lines.append(_row(whole))
    lines.append("")
    lines.append(
        f"At least {1000 * budget['least_seconds']:.1f} ms, at most "
        f"{budget['least_tokens_per_second']:,.0f} tokens/s; the planner expects "
        f"{1000 * budget['estimated_seconds']:.0f} ms."
    )
    if len(profiles) == 2:
        before, after = profiles
        saved = 1000 * (before.step_seconds - after.step_seconds)
        lines.append(f"From the first profile to the second one the step lost {saved:.1f} ms.")
    return lines


def _cells(name: str, part: Part | None, profiles: Sequence[Profile]) -> list[str]:
    """Return the cells of one part's row."""
    least = 0.0
    cells = [name, "", "", "0" if name == HOST else ""]
    if part is not None:
        cells[1] = f"{part.flops / 1e12:.2f}" if part.flops else ""
        cells[2] = f"{part.num_bytes / 1e9:.1f}" if part.num_bytes else ""
        if part.is_needed:
            least = part.seconds
            cells[3] = f"{1000 * least:.1f}"
        else:
            cells[3] = f"0 ({1000 * part.seconds:.1f} with them)"
    for profile in profiles:
        cells.append(f"{1000 * profile.seconds.get(name, 0.0):.1f}")
    if profiles:
        last = profiles[-1]
        cells.append(f"{1000 * (last.seconds.get(name, 0.0) - least):+.1f}")
        longest = [
            f"`{kernel[:60]}` {count:g}, {milliseconds:.2f}"
            for kernel, count, milliseconds in last.longest(name)
        ]
        cells.append("; ".join(longest))
    return cells


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpu", default="h200-141gb", help="a device of `plan --gpu`")
    parser.add_argument("--rates", type=Path, default=RESULTS / "h200_rates.json")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=1, help="ZeRO stage")
    parser.add_argument("--profile", type=Path, help="a run with `profile`, or a trace")
    parser.add_argument("--after", type=Path, help="a second one, after a change")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of a trace without ranges ProfilerStep#"
    )
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.profile is not None and len(arguments.model) > 1:
        parser.error("--profile is one model's: name it with --model")
    if arguments.after is not None and arguments.profile is None:
        parser.error("--after comes beside --profile")
    return arguments


if __name__ == "__main__":
    main()
