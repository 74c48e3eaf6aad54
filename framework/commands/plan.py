"""The `plan` command: what will happen on a cluster, which strategies serve it best, and why; for
people and tools.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TextIO

from deepspeed_lint.topology import find_gpu
from framework.commands.cluster_options import find_cluster
from framework.commands.folded import folded, width
from framework.commands.paper import paper_lines, paper_section
from framework.commands.plan_answer import Answer, answer_to, ordered_by_trials
from framework.commands.plan_files import write_files
from framework.commands.plan_options import add_plan_options
from framework.commands.plan_question import Question, ask, stream_of_notes
from framework.commands.stage_balance import StageBalance, find_stage_balance
from framework.commands.target_search import missing_targets
from framework.config.load import Source
from framework.errors import EXIT_OK, Problem
from framework.load_run import LoadedRun, load_run
from framework.plan.candidate import Candidate
from framework.plan.cluster import Cluster
from framework.plan.hardware import Hardware, host_bytes
from framework.plan.plan import Plan, default_cluster
from framework.plan.plan_text import rows
from framework.system.arguments import parse_command, refuse

# Of what `plan.schema.json` describes, and the keys that every plan has there, null without a
# value.
_JSON_VERSION: Final = 1
_ALWAYS: Final = (
    "version",
    "auto",
    "cluster",
    "layout",
    "loss_tile",
    "length",
    "memory",
    "fits",
    "host",
    "time",
    "machine",
    "strategies",
    "knob",
    "pipeline",
    "trials",
    "paper",
    "costs",
    "refused",
)


def main(words: Sequence[str]) -> int:
    """Print the plan of a run config; returns the exit code."""
    arguments = parse_command("plan", add_plan_options, words)
    run = load_run(arguments.file, arguments.words)
    return _run(arguments, run, find_cluster(arguments))


def _run(arguments: argparse.Namespace, run: LoadedRun, cluster: Cluster | None) -> int:
    """Print the plan of a run with its memory and time, its stages, and the strategies; returns the
    exit code.
    """
    cluster = cluster or default_cluster(run.config)
    gpu = find_gpu(arguments.gpu)
    if gpu:
        cluster = replace(cluster, device=gpu.device)
    _refuse_wrong_arguments(arguments)
    if arguments.measure:
        _measure(cluster, out=stream_of_notes(arguments))
    question = ask(arguments, run, cluster)
    plan = question.plan
    if arguments.explain_oom:
        # imported here, as other modules below: most plans need none of them
        from framework.commands.explain_oom import explain_oom

        return explain_oom(arguments.explain_oom, plan, work=question.work, as_json=arguments.json)
    answer = answer_to(question)
    if arguments.trials:
        answer = ordered_by_trials(answer, arguments.trials)
    balance = StageBalance()
    if plan.layout.pipe_size > 1:
        balance = find_stage_balance(plan, source=run.source)
    findings = _all_findings(plan, run.source, (*balance.notes, *answer.findings), gpu)
    _print_answer(question, answer, balance, findings)
    write_files(question, answer)
    return EXIT_OK


def _all_findings(plan: Plan, source: Source, notes: Sequence[Problem], gpu: Any) -> list[Problem]:
    """Return the findings of the plan, of its targets and of its JSON on a GPU, with the notes."""
    findings = list(plan.findings)
    for problems in (missing_targets(plan.config), notes):
        findings += map(source.locate, problems)
    if gpu:
        from framework.plan.judge_passed import judge_rendered

        findings += judge_rendered(plan, source=source, gpu=gpu)
    return findings


def _print_answer(
    question: Question, answer: Answer, balance: StageBalance, findings: Sequence[Problem]
) -> None:
    if question.arguments.json:
        _print_json(question, answer, balance, findings)
    else:
        _print_lines(question, answer, balance, findings)


def _measure(cluster: Cluster, *, out: TextIO) -> None:
    from framework.commands.measure import measure

    for line in measure(cluster):
        print(line, file=out)


def _refuse_wrong_arguments(arguments: argparse.Namespace) -> None:
    """Raise a UsageError for options that do not go together."""
    runs_here = arguments.measure or arguments.trials
    chart = arguments.chart or ".svg"
    refuse(
        "plan",
        [
            (
                arguments.gpu and runs_here,
                "--measure and --trials use the devices of this machine; leave --gpu out",
            ),
            (arguments.network and not arguments.gpu, "--network goes with --gpu"),
            (
                not chart.lower().endswith(".svg"),
                f"--chart {chart}: what is drawn is SVG; name it .svg",
            ),
        ],
    )


def _print_json(
    question: Question, answer: Answer, balance: StageBalance, findings: Sequence[Problem]
) -> None:
    plan = question.plan
    document: dict[str, Any] = dict.fromkeys(_ALWAYS)
    document["version"] = _JSON_VERSION
    document |= plan.to_dict()
    if question.arguments.paper:
        document["paper"] = paper_section(plan)
    document |= answer.section
    if answer.planned:
        document |= _verdict(answer.planned, question.target)
    if balance.pipeline:
        document["pipeline"] = balance.pipeline
    document["findings"] = [finding.to_dict() for finding in findings]
    print(json.dumps(document, indent=2))


def _verdict(planned: Candidate, target: Hardware) -> dict[str, Any]:
    """Return whether a plan fits, and what its ranks take of a host, as plain values."""
    ranks = planned.plan.cluster.devices_per_host
    taken = host_bytes(planned.memory, ranks)
    fits = None
    if target.memory_bytes is not None or planned.lacking(target):
        fits = not planned.lacking(target)
    return {"fits": fits, "host": {"taken_bytes": taken, "memory_bytes": target.host_bytes}}


def _print_lines(
    question: Question, answer: Answer, balance: StageBalance, findings: Sequence[Problem]
) -> None:
    plan = question.plan
    lines = [f"{label:<10}{text}" for label, text in rows(plan).items()]
    if question.run.choice:
        lines.append(f"{'auto':<10}{question.run.choice.removeprefix('auto: ')}")
    if question.refused:
        why = f"{question.refused.key}: {question.refused.reason} [{question.refused.kind}]"
        lines.append(f"{'refused':<10}as it is written, below is the best of the search: {why}")
    lines += answer.head
    lines += balance.lines
    lines += answer.lines
    if question.arguments.paper:
        lines += paper_lines(plan)
    columns = width()
    for line in lines:
        for piece in folded(line, columns):
            print(piece)
    for finding in findings:  # a line each, which other programs find again
        print(f"{finding.severity}: {finding}")
