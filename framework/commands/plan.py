"""The `plan` command: what will happen on a cluster, which strategies serve it best, and why; for
people and tools.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from framework.commands.check_result import find_gpu
from framework.commands.paper import paper_lines, paper_section
from framework.commands.stage_balance import StageBalance, find_stage_balance
from framework.commands.strategies import (
    is_same,
    loser_lines,
    strategies_section,
    table_lines,
    unusual,
    write_choice,
)
from framework.commands.target_search import missing_targets
from framework.commands.torch_child import NoAnswerError
from framework.commands.traced_work import find_own_optimizer, find_own_work
from framework.config.base import ModelKind
from framework.config.base import Target as TargetSection
from framework.errors import EXIT_OK, ConfigError, Problem, UsageError
from framework.load_run import LoadedRun
from framework.plan.alternatives import settings_text, size_text, with_settings
from framework.plan.auto import listed_target, measured_target
from framework.plan.cluster import Cluster
from framework.plan.memory import Memory, NotEstimatedError
from framework.plan.out_of_memory import IN_WORDS
from framework.plan.plan import Plan, default_cluster, make_plan, rows
from framework.plan.search import (
    EVERYTHING,
    OFFLOAD,
    RECOMPUTE,
    STAGE,
    Candidate,
    Hardware,
    Request,
    SearchResult,
    find_knob,
    judge,
    nearest_plan,
    search,
    search_fewest_devices,
    search_longest_sequence,
    search_more_devices,
)
from framework.plan.time import StepTime
from framework.plan.token_folder import look_at_data
from framework.plan.work import ModelWork
from framework.system.output import write
from framework.text.document import COMMAND_LINE

_TOP: Final = 5
_MOST_LOSERS: Final = 10
# What a plan of another batch, of fewer stages or devices would not have.
_NO_LAYOUT: Final = frozenset(
    {
        "batch-not-divisible",
        "pipe-not-divisible",
        "pipe-exceeds-layers",
        "dataset-smaller-than-batch",
    }
)
_MOMENTS: Final = IN_WORDS | {"start": "after the start", "between": "between steps"}


_SEARCHES: Final = {
    None: search,
    "longest-sequence": search_longest_sequence,
    "fewest-devices": search_fewest_devices,
}


@dataclass(frozen=True)
class _Question:
    """The plan that was asked for, and what is asked beside it."""

    arguments: argparse.Namespace
    run: LoadedRun
    plan: Plan
    target: Hardware
    work: ModelWork | None = None
    why: str = ""

    @property
    def is_wide(self) -> bool:
        """Whether everything that the command line does not set may be chosen."""
        asked = self.arguments
        return bool(asked.search or asked.goal or asked.apply or asked.chart or asked.trials)

    def _is_set_here(self, key: str) -> bool:
        """Whether the command line gives the key a value, by itself or within its section."""
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
        """What may be chosen: beside a plan what leaves its batch as it is."""
        wide = {key for key in EVERYTHING if not self._is_set_here(key)}
        size = self.plan.length.num_train_samples
        free = wide if self.is_wide else {STAGE, OFFLOAD, RECOMPUTE}
        return Request(self.run.config, self.plan.cluster, self.target, free, size, self.work)


def run_plan(arguments: argparse.Namespace, run: LoadedRun, cluster: Cluster | None) -> int:
    """Print the plan of a run with its memory and time, its stages, and the strategies; returns the
    exit code.
    """
    cluster = cluster or default_cluster(run.config)
    gpu = find_gpu(arguments.gpu)
    if gpu:
        cluster = replace(cluster, device=gpu.device)
    if gpu and (arguments.measure or arguments.trials):
        raise UsageError(
            "plan: --measure and --trials use the devices of this machine; leave --gpu out"
        )
    if arguments.network and not arguments.gpu:
        raise UsageError("plan: --network goes with --gpu")
    if arguments.chart and not arguments.chart.lower().endswith(".svg"):
        raise UsageError(f"plan: --chart {arguments.chart}: what is drawn is SVG; name it .svg")
    if arguments.measure:
        # as others below: loaded where it is asked for
        from framework.commands.measure import measure

        print(*measure(cluster), sep="\n", file=sys.stderr if arguments.json else sys.stdout)
    if arguments.gpu:
        target = listed_target(
            arguments.gpu, devices_per_host=cluster.devices_per_host, network=arguments.network
        )
    else:
        target = measured_target(cluster) or Hardware()
    try:
        own = _own_work(run, cluster)
        run = run.chosen(cluster, target, is_proposal=True, work=own[0])
        plan = run.plan_with_data(cluster)
    except ConfigError as error:
        if {problem.kind for problem in error.problems} & _NO_LAYOUT and not run.config.auto:
            _print_nearest(run, cluster)
        raise
    if arguments.explain_oom:
        from framework.commands.explain_oom import explain_oom

        return explain_oom(arguments.explain_oom, plan, work=own[0], as_json=arguments.json)
    question = _Question(arguments, run, plan, target, *own)
    answer = _answer(question)
    if arguments.trials:
        answer = _tried(answer, arguments.trials)
    if plan.layout.pipe_size == 1:
        balance = StageBalance()
    else:
        balance = find_stage_balance(plan, source=run.source)
    notes = map(
        run.source.locate, (*missing_targets(plan.config), *balance.notes, *answer.findings)
    )
    findings = [*plan.findings, *notes]
    if gpu:
        from framework.dslint.judge import judge_rendered

        findings += judge_rendered(plan, source=run.source, gpu=gpu)
    if arguments.json:
        further = ({"paper": paper_section(plan)} if arguments.paper else {}) | answer.section
        further |= {"pipeline": balance.pipeline} if balance.pipeline else {}
        print(
            json.dumps(
                plan.to_dict() | further | {"findings": [found.to_dict() for found in findings]},
                indent=2,
            )
        )
    else:
        if run.choice:
            choice = [f"{'auto':<10}{run.choice.removeprefix('auto: ')}"]
        else:
            choice = []
        print(
            *(f"{label:<10}{text}" for label, text in rows(plan).items()),
            *choice,
            *answer.head,
            sep="\n",
        )
        print(
            *balance.lines,
            *answer.lines,
            sep="\n",
            end="\n" if balance.lines or answer.lines else "",
        )
        if arguments.paper:
            print(*paper_lines(plan), sep="\n")
        for finding in findings:
            print(f"{finding.severity}: {finding}")
    _act(question, answer)
    return EXIT_OK


def _own_work(run: LoadedRun, cluster: Cluster) -> tuple[ModelWork | None, str]:
    """Work of a model of the user's own, or why it, or the memory of an optimizer, is not known;
    neither for named ones.
    """
    is_named = isinstance(run.config.model, ModelKind)
    if is_named and not isinstance(run.config.optimizer, TargetSection):
        return None, ""
    # What is to be chosen does not change the model; these are values that go with everything.
    plain = {"zero.stage": 1, "parallel.pipe": 1, "batch.micro_size": None}
    settings = {key: value for key, value in plain.items() if key in run.config.auto}
    if settings:
        config = with_settings(run.config, settings)
    else:
        config = run.config
    plan = make_plan(config, cluster, source=run.source)
    why = find_own_optimizer(plan)
    try:
        return find_own_work(plan), why
    except NoAnswerError as error:
        return None, str(error)


@dataclass(frozen=True)
class _Answer:
    """What is known of memory, time and strategies: lines for a person, a section for tools, and
    what is wrong.
    """

    section: dict[str, Any]
    head: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    findings: tuple[Problem, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    planned: Candidate | None = None


def _answer(question: _Question) -> _Answer:
    plan = question.plan
    target = question.target
    wide = question.is_wide
    try:
        planned = judge(plan, target, work=question.work)
        found = _SEARCHES[question.arguments.goal](question.request)
    except NotEstimatedError as error:
        reason = f"{error}{question.why and f' ({question.why})'}"
        return _Answer({"memory": {"unknown": reason}}, (f"{'memory':<10}not estimated: {reason}",))
    shown = [each for each in found.ranked if wide or _is_alternative(each, planned)]
    shown = shown[: question.arguments.top or _TOP]
    head = [
        *_memory_lines(planned.memory, target, kept=plan.config.checkpoint.keep_last),
        *_time_lines(planned.time, target),
    ]
    lines = [
        f"{'best':<10}{_order([*shown, planned], target)}; * as planned; batch: micro x steps x "
        "ranks"
    ]
    in_order = [each for each in found.ranked if each in shown or is_same(each, planned)]
    lines += [f"          {line}" for line in table_lines(in_order, planned=planned)]
    knob = find_knob(shown[0].plan if wide and shown else plan, target, work=question.work)
    if target.memory_bytes is not None or wide:
        lost = list(loser_lines(found, shown=in_order))
        if len(lost) > _MOST_LOSERS:
            more = [f"and {len(lost) - _MOST_LOSERS} more: --json has all"]
        else:
            more = []
        rest = [*lost[:_MOST_LOSERS], *more]
        lines += [f"{'' if number else 'others':<10}{line}" for number, line in enumerate(rest)]
    lines += [f"{'knob':<10}{knob}"] if knob else []
    section = {"memory": planned.memory.to_dict(), "strategies": strategies_section(found, shown)}
    section |= {"time": planned.time.to_dict()} if planned.time else {}
    section |= (
        {"machine": target.machine.to_dict() | {"rates": target.rates}} if target.machine else {}
    )
    section |= {} if knob is None else {"knob": vars(knob) | {"text": str(knob)}}
    return _Answer(
        section,
        tuple(head),
        tuple(lines),
        tuple(_findings(question, planned, found)),
        tuple(shown),
        planned,
    )


def _tried(answer: _Answer, count: int) -> _Answer:
    """The answer with its best strategies, and the plan as it stands, in the order in which they
    were measured.
    """
    from framework.commands.trials import fastest, run_trials, table

    tried = list(answer.candidates[:count])
    planned = answer.planned
    if planned is not None and all(each.choice != planned.choice for each in tried):
        tried.append(planned)
    trials = run_trials(tried)
    best = tried[fastest(trials)]
    rest = [each for each in answer.candidates if each is not best]
    section = answer.section | {"trials": [each.to_dict() for each in trials]}
    return replace(
        answer, section=section, lines=(*answer.lines, *table(trials)), candidates=(best, *rest)
    )


def _is_alternative(one: Candidate, planned: Candidate) -> bool:
    """Beside a plan stands what takes less memory, or is faster."""
    speeds = one.samples_per_second, planned.samples_per_second
    is_faster = speeds[0] is not None and speeds[1] is not None and speeds[0] > 1.02 * speeds[1]
    return is_faster or one.peak_bytes < 0.99 * planned.peak_bytes


def _order(shown: Sequence[Candidate], target: Hardware) -> str:
    if any(each.time is not None for each in shown):
        return "the fastest first, estimated"
    if target.name:
        why = f"not all rates of {target.name} are listed"
    else:
        why = "no device named (--gpu)"
    return f"the least traffic first, speed unknown: {why}"


def _memory_lines(memory: Memory, target: Hardware, *, kept: int) -> Iterator[str]:
    peak = memory.peak
    host = sum(memory.host.values())
    if memory.stage is None:
        stage = ""
    else:
        stage = f", stage {memory.stage}, the fullest"
    if memory.lacks:
        lacks = f", without activations: {memory.lacks}"
    else:
        lacks = ""
    usable = target.usable_bytes(memory)
    if usable:
        of = f" of {size_text(usable)} usable"
    else:
        of = ""
    yield (
        f"{'memory':<10}{size_text(memory.total('between'))} on each rank between steps, "
        f"{size_text(memory.total(peak))} at most ({_MOMENTS[peak]}){of}"
        f"{f', {size_text(host)} on the host' if host else ''}; estimated{stage}{lacks}"
    )
    for label, found in (
        ("at most", memory.moments[peak]),
        ("beside tensors", memory.beside),
        ("host", memory.host),
        ("drive", memory.drive),
    ):
        sizes = sorted(found.items(), key=lambda item: -item[1])
        if sizes:
            yield (
                f"          {label}: "
                f"{', '.join(f'{name} {size_text(size)}' for name, size in sizes)}"
            )
    one = size_text(memory.saved_bytes)
    most = size_text((kept + 1) * memory.saved_bytes)
    yield f"          on disk: {one} a checkpoint, {most} for {kept} kept and one being written"


def _time_lines(time: StepTime | None, target: Hardware) -> Iterator[str]:
    if time is None:
        return
    tokens = time.tokens_per_second_per_device
    yield (
        f"{'time':<10}{time.total:.3g} s a step, {time.samples_per_second:,.1f} samples per second"
        f"{'' if tokens is None else f', {tokens:,.0f} tokens per second and device'}, "
        f"model FLOPs utilization {time.mfu:.0%}; estimated for {target.text}"
    )
    parts = sorted(time.seconds.items(), key=lambda item: -item[1])
    yield f"          {', '.join(f'{name} {part:.3g} s' for name, part in parts)}"


def _findings(question: _Question, planned: Candidate, found: SearchResult) -> Iterator[Problem]:
    """A plan that does not fit, with the nearest that does."""
    target = question.target
    key = "zero.stage"
    reason = target.lacking(planned.memory)
    if not reason:
        return
    if found.ranked:
        best = found.ranked[0]
        cluster = found.ranked[0].plan.cluster
        if cluster == planned.plan.cluster:
            where = ""
        else:
            where = f"use {cluster}, and "
        fix = f"{where}set {settings_text(best.changes(planned)) or 'as above'}"
    else:
        reason = f"{reason}; nothing fits: {found.block}"
        fix = _devices_that_fit(question, planned)
    stage = planned.plan.config.zero.stage
    yield Problem("memory-too-small", reason, fix, key, stage, severity="warning")


def _devices_that_fit(question: _Question, planned: Candidate) -> str:
    asked = replace(question.request, free=EVERYTHING)
    if not question.is_wide and (found := search(asked)).ranked:
        return f"set {settings_text(found.ranked[0].changes(planned))}"
    more = search_more_devices(asked)
    if more is None:
        return "use a smaller model, or devices with more memory"
    best = more.ranked[0]
    return (
        f"use {best.plan.cluster.world_size} devices with {settings_text(unusual(best.settings))}"
    )


def _print_nearest(run: LoadedRun, cluster: Cluster) -> None:
    _, size = look_at_data(run.config, data_elsewhere=True)
    found = nearest_plan(run.config, cluster, num_train_samples=size)
    if found:
        change = found[0]
        layout = str(found[1].layout)
        write(
            sys.stdout, f"{'nearest':<10}{layout if change == layout else f'{change}: {layout}'}\n"
        )


def _act(question: _Question, answer: _Answer) -> None:
    """Write what was asked for: the choice into the file, and the chart."""
    arguments = question.arguments
    run = question.run
    out = sys.stderr if arguments.json else sys.stdout
    if not (arguments.apply or arguments.chart):
        return
    if not answer.candidates:
        raise UsageError("plan: there is no strategy that fits, so that nothing is written")
    if arguments.apply:
        if arguments.goal == "fewest-devices":
            write(out, f"devices   {answer.candidates[0].plan.cluster}\n")
        best = answer.candidates[0]
        planned = answer.planned
        source = run.source
        before = planned.choice if planned else {}
        asked = {
            key
            for key in best.settings
            if source.is_override(tuple(key.split("."))) or key in run.config.was_auto
        }
        settings = {
            key: value
            for key, value in best.settings.items()
            if key in asked or before.get(key) != value
        }
        diff = write_choice(run.config_path, arguments.words, settings)
        write(out, f"{diff or f'{run.config_path}: it says so already'}\n")
        further = [word for word in arguments.words if word.partition("=")[0] not in settings]
        if further:
            write(
                out,
                f"note      chosen with {' '.join(further)}, which {run.config_path} does not "
                "hold\n",
            )
    if arguments.chart:
        from framework.commands.check_fix import write_file
        from framework.commands.memory_chart import draw_chart
        from framework.report.draw import Chart

        limit = question.target.usable_bytes(answer.candidates[0].memory)
        chart = draw_chart(
            answer.candidates, limit_bytes=limit, title=question.plan.config.run.name
        )
        place = Path(arguments.chart)
        write_file(place, chart, name=arguments.chart, marks=[Chart.MARK])
