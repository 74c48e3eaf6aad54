"""The `plan` command: what will happen on a cluster, which strategies serve it best, and why; for
people and tools.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from deepspeed_lint.text.document import COMMAND_LINE
from deepspeed_lint.topology import find_gpu
from framework.commands.cluster_options import find_cluster
from framework.commands.folded import folded, width
from framework.commands.paper import paper_lines, paper_section
from framework.commands.plan_options import add_plan_options
from framework.commands.stage_balance import StageBalance, find_stage_balance
from framework.commands.strategies import (
    is_same,
    loser_lines,
    strategies_section,
    table_lines,
    write_choice,
)
from framework.commands.target_search import missing_targets
from framework.commands.torch_child import NoAnswerError
from framework.commands.traced_work import find_own_optimizer, find_own_work
from framework.config.run_config import RunConfig
from framework.errors import EXIT_OK, ConfigError, Problem, UsageError
from framework.load_run import LoadedRun, load_run
from framework.plan.alternatives import settings_text, size_text, with_settings
from framework.plan.auto import listed_target, measured_target
from framework.plan.candidate import Candidate, judge
from framework.plan.cluster import Cluster
from framework.plan.costs import KeyCost, costs_of_keys
from framework.plan.data_files import look_at_data
from framework.plan.hardware import USUAL_CARD, Hardware, host_bytes
from framework.plan.knob import Knob, find_knob
from framework.plan.layout import Layout
from framework.plan.memory import Memory, NotEstimatedError
from framework.plan.nearest_plan import nearest_plan
from framework.plan.otherwise import Otherwise, runs_that_fit
from framework.plan.out_of_memory import IN_WORDS
from framework.plan.plan import Length, Plan, default_cluster, make_plan, rows
from framework.plan.search import SearchResult, search
from framework.plan.search_goals import (
    search_fewest_devices,
    search_longest_sequence,
    search_more_devices,
)
from framework.plan.search_space import (
    EVERYTHING,
    MICRO,
    WITHOUT_BATCH,
    Request,
    unusual,
)
from framework.plan.time import StepTime
from framework.plan.work import ModelWork
from framework.system.arguments import parse_command, refuse
from framework.system.output import write

_TOP: Final = 5
_MOST_LOSERS: Final = 10
# Kinds of problems that a plan with another batch, fewer stages or fewer devices would not have.
_NO_LAYOUT: Final = frozenset(
    {
        "batch-not-divisible",
        "pipe-not-divisible",
        "pipe-exceeds-layers",
        "dataset-smaller-than-batch",
    }
)
_MOMENTS: Final = IN_WORDS | {"start": "after the start", "between": "between steps"}
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
_INDENT: Final = "          "  # in place of a label
_SEARCHES: Final = {
    None: search,
    "longest-sequence": search_longest_sequence,
    "fewest-devices": search_fewest_devices,
}


@dataclass(frozen=True)
class _Question:
    """The plan of the command line, and what the options request beside it.

    Attributes:
        arguments: the command line.
        run: the run config with its settings.
        plan: its plan.
        target: the devices, and their rates as far as they are known.
        work: of a model of the user's own.
        why: the reason why the memory of an optimizer of the user's own is not known.
        written: the run config before its ``auto`` keys were chosen; None: it has none.
        refused: the problem of the config as it is written, where the plan is the best that a
            search found in its place.
        result: of that search.
    """

    arguments: argparse.Namespace
    run: LoadedRun
    plan: Plan
    target: Hardware
    work: ModelWork | None = None
    why: str = ""
    written: RunConfig | None = None
    refused: Problem | None = None
    result: SearchResult | None = None

    @property
    def is_wide(self) -> bool:
        """Whether everything that the command line does not set may be chosen."""
        options = self.arguments
        return bool(
            options.search or options.goal or options.apply or options.chart or options.trials
        )

    def _is_set_here(self, key: str) -> bool:
        """Check whether the command line gives the key a value, alone or with its section."""
        names = key.split(".")
        section = self.run.config
        if self.run.source.place(tuple(names))[0] != COMMAND_LINE:
            return False
        for name in names:
            if name not in section.model_fields_set:
                return False
            section = getattr(section, name)
        return section is not None

    @property
    def request(self) -> Request:
        """The search's request: without a wide one only settings that leave the batch as it is."""
        if self.is_wide:
            free_keys = {key for key in EVERYTHING if not self._is_set_here(key)}
            free_keys |= self.run.config.auto
        else:
            free_keys = set(WITHOUT_BATCH)
        return Request(
            self.run.config,
            self.plan.cluster,
            self.target,
            free_keys,
            self.plan.length.num_train_samples,
            self.work,
        )

    def search(self) -> SearchResult:
        """Return the result of the search that the options ask for, which a refused config has.

        Raises:
            NotEstimatedError: the model's memory is not known.
        """
        if self.result is not None:
            return self.result
        return _SEARCHES[self.arguments.goal](self.request)


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
        _measure(cluster, out=_stream_of_notes(arguments))
    question = _question(arguments, run, cluster)
    plan = question.plan
    if arguments.explain_oom:
        # imported here, as other modules below: most plans need none of them
        from framework.commands.explain_oom import explain_oom

        return explain_oom(arguments.explain_oom, plan, work=question.work, as_json=arguments.json)
    answer = _answer(question)
    if arguments.trials:
        answer = _ordered_by_trials(answer, arguments.trials)
    balance = StageBalance()
    if plan.layout.pipe_size > 1:
        balance = find_stage_balance(plan, source=run.source)
    findings = list(plan.findings)
    for problems in (missing_targets(plan.config), balance.notes, answer.findings):
        findings += map(run.source.locate, problems)
    if gpu:
        from framework.plan.judge_passed import judge_rendered

        findings += judge_rendered(plan, source=run.source, gpu=gpu)
    _print_answer(question, answer, balance, findings)
    _write_files(question, answer)
    return EXIT_OK


def _stream_of_notes(arguments: argparse.Namespace) -> TextIO:
    """Return the stream for what is printed beside the plan: stdout is a tool's with ``--json``."""
    if arguments.json:
        return sys.stderr
    return sys.stdout


def _print_answer(
    question: _Question, answer: _Answer, balance: StageBalance, findings: Sequence[Problem]
) -> None:
    if question.arguments.json:
        _print_json(question, answer, balance, findings)
    else:
        _print_lines(question, answer, balance, findings)


def _measure(cluster: Cluster, *, out: TextIO) -> None:
    from framework.commands.measure import measure

    for line in measure(cluster):
        print(line, file=out)


def _question(arguments: argparse.Namespace, run: LoadedRun, cluster: Cluster) -> _Question:
    """Plan the run. If no layout fits the cluster, the nearest plan that would is printed before
    the error.

    Raises:
        ConfigError: there is no such plan.
    """
    target = _find_target(arguments, cluster)
    written = run.config
    try:
        work, why = _own_work(run, cluster)
        run = run.chosen(cluster, target, is_proposal=True, work=work)
        plan = run.plan_with_data(cluster)
    except ConfigError as error:
        as_written = _question_as_written(arguments, run, cluster, target)
        instead = _found_instead(as_written)
        if instead is not None:
            return replace(instead, refused=error.problems[0])
        kinds = {problem.kind for problem in error.problems}
        if kinds & _NO_LAYOUT and not run.config.auto:
            _print_nearest(run, cluster)
        if "auto-nothing-fits" in kinds:
            _print_others(_widest_request(as_written))
        raise
    return _Question(arguments, run, plan, target, work, why, written)


def _question_as_written(
    arguments: argparse.Namespace, run: LoadedRun, cluster: Cluster, target: Hardware
) -> _Question:
    """Return the question about a config that cannot be as it is written, in place of a plan with
    its cluster and data alone.
    """
    _, size = look_at_data(run.config, data_elsewhere=True)
    length = Length(None, None, size, 0)
    plan = Plan(run.config, cluster, Layout(1, 1, 1, 1, 1), length, ())
    return _Question(arguments, run, plan, target)


def _found_instead(as_written: _Question) -> _Question | None:
    """Return the question with the best plan that a wide search finds for a config that cannot be
    as it is written; None without one.
    """
    if not as_written.is_wide:
        return None
    try:
        result = as_written.search()
    except (NotEstimatedError, UsageError):
        return None
    if not result.ranked:
        return None
    return replace(as_written, plan=result.ranked[0].plan, result=result)


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


def _find_target(arguments: argparse.Namespace, cluster: Cluster) -> Hardware:
    """Return the devices of ``--gpu`` as they are listed, or those of this machine as measured."""
    if arguments.gpu:
        return listed_target(
            arguments.gpu,
            devices_per_host=cluster.devices_per_host,
            network=arguments.network,
            host_bytes=arguments.host_memory,
        )
    target = measured_target(cluster) or Hardware()
    return replace(target, host_bytes=arguments.host_memory)


def _print_json(
    question: _Question, answer: _Answer, balance: StageBalance, findings: Sequence[Problem]
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
    question: _Question, answer: _Answer, balance: StageBalance, findings: Sequence[Problem]
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


def _own_work(run: LoadedRun, cluster: Cluster) -> tuple[ModelWork | None, str]:
    """Return the work of a model of the user's own, or None, and a text: why that work, or the
    memory of an optimizer of the user's own, is not known. Both take a child process; a named model
    and optimizer need none.
    """
    if not run.config.model.is_own_code and run.config.optimizer.own_factory() is None:
        return None, ""
    plan = make_plan(_without_auto(run.config), cluster, source=run.source)
    why = find_own_optimizer(plan)
    try:
        return find_own_work(plan), why
    except NoAnswerError as error:
        return None, str(error)


def _without_auto(config: RunConfig) -> RunConfig:
    """Set plain values for the keys to be chosen: they do not change the model."""
    settings: dict[str, Any] = dict.fromkeys(config.auto, 1)
    if MICRO in settings:
        settings[MICRO] = None
    if settings:
        return with_settings(config, settings)
    return config


@dataclass(frozen=True)
class _Answer:
    """Memory, time and strategies of a plan.

    Attributes:
        section: all of it as plain values, for JSON.
        head: lines on memory and time.
        lines: lines on the strategies.
        findings: warnings.
        candidates: the strategies that are shown, the best one first.
        planned: the plan itself as a candidate; None if its memory is not estimated.
    """

    section: dict[str, Any]
    head: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    findings: tuple[Problem, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    planned: Candidate | None = None


def _answer(question: _Question) -> _Answer:
    """Estimate the plan's memory and time, and search for strategies."""
    plan = question.plan
    target = question.target
    try:
        planned = judge(plan, target, work=question.work)
        result = question.search()
    except NotEstimatedError as error:
        return _not_estimated(question, error)
    candidates = _candidates_to_show(question, planned, result)
    head = list(_memory_lines(planned, target))
    head += _time_lines(planned.time, target)
    costs = _costs(question, planned)
    for number, cost in enumerate(costs):
        label = "" if number else "costs"
        head.append(f"{label:<10}{cost}")
    lines = list(_strategy_lines(question, planned, result, candidates))
    section: dict[str, Any] = {
        "memory": planned.memory.to_dict(),
        "strategies": strategies_section(result, candidates),
    }
    if planned.time:
        section["time"] = planned.time.to_dict()
    if costs:
        section["costs"] = [cost.to_dict() for cost in costs]
    if question.refused:
        section["refused"] = question.refused.to_dict()
    if target.machine:
        section["machine"] = target.machine.to_dict() | {"rates": target.rates}
    widest = _widest_search(question, planned, result)
    if widest is not None and not widest.ranked:
        others = list(runs_that_fit(_widest_request(question)))
        lines += _other_lines(others)
        section["strategies"]["otherwise"] = [other.to_dict() for other in others]
    knob = _knob(question, candidates)
    if knob:
        lines.append(f"{'knob':<10}{knob}")
        section["knob"] = vars(knob) | {"text": str(knob)}
    return _Answer(
        section,
        head=tuple(head),
        lines=tuple(lines),
        findings=tuple(_findings(question, planned, result, widest)),
        candidates=tuple(candidates),
        planned=planned,
    )


def _costs(question: _Question, planned: Candidate) -> list[KeyCost]:
    """Return what fixed keys cost; nothing where a search frees them anyway."""
    if question.is_wide:
        return []
    written = question.written or question.run.config
    return costs_of_keys(question.request, planned, written)


def _not_estimated(question: _Question, error: NotEstimatedError) -> _Answer:
    """Return the answer for a plan without an estimate of its memory: the reason alone."""
    reason = str(error)
    if question.why:
        reason += f" ({question.why})"
    return _Answer({"memory": {"unknown": reason}}, (f"{'memory':<10}not estimated: {reason}",))


def _knob(question: _Question, candidates: Sequence[Candidate]) -> Knob | None:
    """Find the setting that frees most in the best strategy, or in the plan itself."""
    plan = question.plan
    if question.is_wide and candidates:
        plan = candidates[0].plan
    return find_knob(plan, question.target, work=question.work)


def _candidates_to_show(
    question: _Question, planned: Candidate, result: SearchResult
) -> list[Candidate]:
    """Return the best strategies, as many as ``--top``; beside a plan only clear alternatives."""
    candidates = list(result.ranked)
    if not question.is_wide:
        candidates = _alternatives(planned, result)
    return candidates[: question.arguments.top or _TOP]


def _alternatives(planned: Candidate, result: SearchResult) -> list[Candidate]:
    """Return the strategies that are clear alternatives to a plan: all, where it does not fit."""
    if planned.lacking(result.target):
        return list(result.ranked)
    return [candidate for candidate in result.ranked if _is_better(candidate, planned)]


def _is_better(candidate: Candidate, planned: Candidate) -> bool:
    """Check that a candidate is more than 2 % faster than the plan, or where speeds are not known
    takes a tenth less memory.
    """
    speed = candidate.samples_per_second
    planned_speed = planned.samples_per_second
    if speed is not None and planned_speed is not None:
        return speed > 1.02 * planned_speed
    return candidate.peak_bytes < 0.9 * planned.peak_bytes


def _strategy_lines(
    question: _Question, planned: Candidate, result: SearchResult, candidates: Sequence[Candidate]
) -> Iterator[str]:
    """Yield the table of the candidates, and why other strategies lost; beside a plan alone one
    line, if there are clear alternatives.
    """
    target = question.target
    if not question.is_wide:
        yield from _alternative_line(planned, result)
        return
    order = _order_text([*candidates, planned], target)
    yield f"{'best':<10}{order}; * as planned; batch: micro x steps x ranks"
    shown = [each for each in result.ranked if each in candidates or is_same(each, planned)]
    columns = width() - len(_INDENT)
    fits = not planned.lacking(target)
    for line in table_lines(shown, planned=planned, fits=fits, columns=columns):
        yield f"{_INDENT}{line}"
    yield from _loser_lines(result, shown)


def _alternative_line(planned: Candidate, result: SearchResult) -> Iterator[str]:
    """Yield the best strategy beside the plan."""
    others = _alternatives(planned, result)
    if not others:
        return
    best = others[0]
    text = f"{settings_text(best.changes(planned))}: {size_text(best.peak_bytes)} at most"
    if best.samples_per_second is not None:
        text += f", {best.samples_per_second:,.1f} samples per second"
    if len(others) > 1:
        text += f", the best of {len(others)}"
    yield f"{'instead':<10}{text}; --search has the table"


def _loser_lines(result: SearchResult, shown: Sequence[Candidate]) -> Iterator[str]:
    """Yield why strategies that are not shown lost, the first ones."""
    lost = list(loser_lines(result, shown=shown))
    num_left_out = len(lost) - _MOST_LOSERS
    if num_left_out > 0:
        lost = lost[:_MOST_LOSERS]
        lost.append(f"and {num_left_out} more: --json has all")
    label = "others"
    for line in lost:
        yield f"{label:<10}{line}"
        label = ""


def _ordered_by_trials(answer: _Answer, count: int) -> _Answer:
    """Run the best `count` strategies and the plan itself here, and put the fastest one first.
    Blocks for the runs.
    """
    from framework.commands.trials import fastest, run_trials, table

    tried = _candidates_to_try(answer, count)
    trials = run_trials(tried)
    best = tried[fastest(trials)]
    others = [candidate for candidate in answer.candidates if candidate is not best]
    return replace(
        answer,
        section=answer.section | {"trials": [trial.to_dict() for trial in trials]},
        lines=answer.lines + tuple(table(trials)),
        candidates=(best, *others),
    )


def _candidates_to_try(answer: _Answer, count: int) -> list[Candidate]:
    """Return the best `count` strategies, and the plan itself if it is none of them."""
    candidates = list(answer.candidates[:count])
    planned = answer.planned
    if planned is not None and all(each.choice != planned.choice for each in candidates):
        candidates.append(planned)
    return candidates


def _order_text(shown: Sequence[Candidate], target: Hardware) -> str:
    """Return the order of the strategies in words, with the reason if their speed is not known."""
    if any(candidate.time is not None for candidate in shown):
        return "the fastest first, estimated"
    if target.name:
        why = f"not all rates of {target.name} are listed"
    else:
        why = "no device named (--gpu)"
    return f"in the order of a card on PCIe ({USUAL_CARD}), speed unknown: {why}"


def _on_disk(plan: Plan, num_bytes: int) -> str:
    """Return the room of checkpoints of this size on disk, in words."""
    kept = plan.num_newest_kept()
    saved = f"{size_text(num_bytes)} a checkpoint"
    if kept is None:
        return f"{saved}, and all are kept"
    room = size_text((kept + 1) * num_bytes)
    return f"{saved}, {room} for {kept} kept and one being written"


def _memory_lines(planned: Candidate, target: Hardware) -> Iterator[str]:
    """Yield lines on the memory of a rank, of a host, and on disk."""
    memory = planned.memory
    yield f"{'memory':<10}{_memory_text(memory, target)}"
    for label, components in (
        ("at most", memory.moments[memory.peak]),
        ("beside tensors", memory.beside),
        ("host, a rank", memory.host),
        ("drive", memory.drive),
    ):
        sizes = [f"{name} {size_text(size)}" for name, size in _largest_first(components)]
        if sizes:
            yield f"{_INDENT}{label}: {', '.join(sizes)}"
    on_host = target.host_text(memory, planned.plan.cluster.devices_per_host)
    if on_host:
        yield f"{_INDENT}on hosts: {on_host}"
    yield f"{_INDENT}on disk: {_on_disk(planned.plan, memory.saved_bytes)}"


def _memory_text(memory: Memory, target: Hardware) -> str:
    peak = memory.peak
    between = size_text(memory.total("between"))
    at_most = size_text(memory.total(peak))
    text = f"{between} on each rank between steps, {at_most} at most ({_MOMENTS[peak]})"
    usable = target.usable_text(memory)
    if usable:
        text += f" of {usable}"
    text += "; estimated"
    if memory.stage is not None:
        text += f", stage {memory.stage}, the fullest"
    if memory.lacks:
        text += f", without activations: {memory.lacks}"
    return text


def _time_lines(time: StepTime | None, target: Hardware) -> Iterator[str]:
    if time is None:
        return
    line = f"{time.total:.3g} s a step, {time.samples_per_second:,.1f} samples per second"
    tokens = time.tokens_per_second_per_device
    if tokens is not None:
        line += f", {tokens:,.0f} tokens per second and device"
    line += f", model FLOPs utilization {time.mfu:.0%}; estimated for {target.text}"
    yield f"{'time':<10}{line}"
    parts = [f"{name} {seconds:.3g} s" for name, seconds in _largest_first(time.seconds)]
    yield f"{_INDENT}{', '.join(parts)}"


def _largest_first(components: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(components.items(), key=lambda item: -item[1])


def _widest_request(question: _Question) -> Request:
    """Return the request of a search in which all keys of a strategy are free."""
    request = question.request
    if question.is_wide:
        return request
    return replace(request, free=EVERYTHING)


def _widest_search(
    question: _Question, planned: Candidate, result: SearchResult
) -> SearchResult | None:
    """Return the result of the widest search, where neither a plan nor a strategy beside it fits;
    None where one does.
    """
    if result.ranked or not planned.lacking(question.target):
        return None
    if question.is_wide:
        return result
    return search(_widest_request(question))


def _findings(
    question: _Question, planned: Candidate, result: SearchResult, widest: SearchResult | None
) -> Iterator[Problem]:
    """Warn of a plan that does not fit the memory, with the nearest that does as the fix."""
    reason = planned.lacking(question.target)
    if not reason:
        return
    if widest is not None:
        reason = f"{reason}; nothing fits: {result.block}"
        fix = _devices_that_fit(question, planned, widest)
    else:
        best = result.ranked[0]
        fix = f"set {settings_text(best.changes(planned)) or 'as above'}"
        if best.plan.cluster != planned.plan.cluster:
            fix = f"use {best.plan.cluster}, and {fix}"
    stage = planned.plan.config.zero.stage
    yield Problem("memory-too-small", reason, fix, "zero.stage", stage, severity="warning")


def _devices_that_fit(question: _Question, planned: Candidate, widest: SearchResult) -> str:
    """Return the fix for a plan that no strategy beside it makes fit: the settings of the widest
    search, or more devices.
    """
    if widest.ranked:
        return f"set {settings_text(widest.ranked[0].changes(planned))}"
    on_more_devices = search_more_devices(replace(question.request, free=EVERYTHING))
    if on_more_devices is None:
        return "use a smaller model, or devices with more memory"
    best = on_more_devices.ranked[0]
    settings = settings_text(unusual(best.settings))
    return f"use {best.plan.cluster.world_size} devices with {settings}"


def _print_others(request: Request) -> None:
    """Print the other runs that fit."""
    for line in _other_lines(list(runs_that_fit(request))):
        write(sys.stdout, f"{line}\n")


def _other_lines(others: Sequence[Otherwise]) -> Iterator[str]:
    label = "otherwise"
    for other in others:
        yield f"{label:<10}{other}"
        label = ""


def _print_nearest(run: LoadedRun, cluster: Cluster) -> None:
    """Print the nearest plan that is possible, if there is one."""
    _, size = look_at_data(run.config, data_elsewhere=True)
    nearest = nearest_plan(run.config, cluster, num_train_samples=size)
    if nearest:
        change, plan = nearest
        layout = str(plan.layout)
        if change != layout:
            layout = f"{change}: {layout}"
        write(sys.stdout, f"{'nearest':<10}{layout}\n")


def _write_files(question: _Question, answer: _Answer) -> None:
    """Write the best strategy into the run config (--apply), and the chart (--chart). UsageError if
    no strategy fits.
    """
    arguments = question.arguments
    if not (arguments.apply or arguments.chart):
        return
    if not answer.candidates:
        raise UsageError("plan: there is no strategy that fits, so that nothing is written")
    if arguments.apply:
        _apply_best(question, answer)
    if arguments.chart:
        _write_chart(arguments.chart, question, answer)


def _write_chart(file: str, question: _Question, answer: _Answer) -> None:
    from framework.commands.check_fix import write_file
    from framework.commands.memory_chart import draw_chart
    from framework.report.chart import Chart

    limit = question.target.usable_bytes(answer.candidates[0].memory)
    title = question.plan.config.run.name
    chart = draw_chart(answer.candidates, limit_bytes=limit, title=title)
    write_file(Path(file), chart, name=file, marks=[Chart.MARK])


def _apply_best(question: _Question, answer: _Answer) -> None:
    """Write the settings of the best strategy that the file does not imply, and print the diff."""
    arguments = question.arguments
    run = question.run
    out = _stream_of_notes(arguments)
    if arguments.goal == "fewest-devices":
        write(out, f"devices   {answer.candidates[0].plan.cluster}\n")
    settings = _settings_to_write(run, answer, is_refused=question.refused is not None)
    diff = write_choice(run.config_path, arguments.words, settings)
    diff = diff or f"{run.config_path}: it says so already"
    write(out, f"{diff}\n")
    further = [word for word in arguments.words if word.partition("=")[0] not in settings]
    if further:
        words = " ".join(further)
        write(out, f"note      chosen with {words}, which {run.config_path} does not hold\n")


def _settings_to_write(
    run: LoadedRun, answer: _Answer, *, is_refused: bool = False
) -> dict[str, Any]:
    """Return the best strategy's settings that differ from the plan, or that the file leaves open:
    keys that the command line sets, and ``auto`` ones.
    """
    planned_choice: Mapping[str, Any] = {}
    if answer.planned and not is_refused:
        planned_choice = answer.planned.choice
    settings = {}
    for key, value in answer.candidates[0].settings.items():
        is_override = run.source.is_override(tuple(key.split(".")))
        was_auto = key in run.config.was_auto
        if is_override or was_auto or planned_choice.get(key) != value:
            settings[key] = value
    return settings
