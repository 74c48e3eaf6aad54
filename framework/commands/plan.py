"""The `plan` command: what will happen on a cluster, for a person or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from framework.errors import EXIT_OK

if TYPE_CHECKING:  # every command lists the options of this one, and needs nothing else of it
    from framework.config.load import Source
    from framework.plan.plan import Plan


def add_options(plan: argparse.ArgumentParser) -> None:
    """Add the options that `plan` takes beside file, settings and cluster."""
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--gpu", metavar="KIND", help="say what fits this GPU, for example h100-80gb")


def run_plan(arguments: argparse.Namespace, plan: Plan, source: Source) -> int:
    """Print the plan of a run with its memory and, of a pipeline, its stages; returns the exit code."""
    from framework.commands.memory_table import memory_table
    from framework.commands.own_work import find_own_work
    from framework.commands.stage_balance import StageBalance, find_stage_balance
    from framework.commands.target_search import missing_targets
    from framework.commands.torch_child import NoAnswerError
    from framework.commands.verdict import find_gpu
    from framework.plan.memory import memory_section
    from framework.plan.plan import rows

    gpu = find_gpu(arguments.gpu)
    work, why = None, ""
    try:
        work = find_own_work(plan)
    except NoAnswerError as error:
        why = str(error)
    name, size = (gpu.name, gpu.memory_gib) if gpu else ("", None)
    memory = memory_table(plan, work=work, why=why, gpu=name, memory_gib=size)
    balance = StageBalance() if plan.layout.pipe_size == 1 else find_stage_balance(plan, source=source)
    notes = map(source.locate, (*missing_targets(plan.config), *balance.notes, *memory.findings))
    findings = [*plan.findings, *notes]
    if arguments.json:
        further = ({"pipeline": balance.pipeline} if balance.pipeline else {}) | memory_section(
            plan, work=work, why=why
        )
        print(json.dumps(plan.to_dict() | further | {"findings": [found.to_dict() for found in findings]}, indent=2))
        return EXIT_OK
    print(*(f"{label:<10}{text}" for label, text in rows(plan).items()), *memory.lines, *balance.lines, sep="\n")
    for finding in findings:
        print(f"{finding.severity}: {finding}")
    return EXIT_OK
