"""The check of one file: a run config or any DeepSpeed JSON. Its problems are in the result, and
never raised.

Either kind of file needs modules that the other does not, and importing them is most of the time
that checking one file takes (`benchmarks/check_speed.py`): they are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_lint.report import CheckResult
from deepspeed_lint.text.document import YAML_ENDINGS, Document, read_text
from framework.errors import ConfigError, Problem, UsageError

if TYPE_CHECKING:
    from deepspeed_lint.readers import Reader
    from deepspeed_lint.topology import GpuKind, Target
    from framework.plan.cluster import Cluster
    from framework.plan.hardware import Hardware
    from framework.plan.plan import Plan


@dataclass(frozen=True)
class CheckContext:
    """Context that files are judged against.

    Attributes:
        cluster: where they are to run, or None if the command line does not name it.
        gpu: which GPU, or None if the command line does not name it.
        host_bytes: memory of a host; None: not known.
        release: DeepSpeed's version; None: the newest known.
        reader: the program that reads DeepSpeed JSON first; None: the file shows it.
        data_elsewhere: data that is not here is a warning, not an error.
    """

    cluster: Cluster | None = None
    gpu: GpuKind | None = None
    host_bytes: int | None = None
    release: str | None = None
    reader: Reader | None = None
    data_elsewhere: bool = False

    def target(self) -> Target:
        """Return what DeepSpeed JSON is judged against."""
        from deepspeed_lint.topology import Target, Topology
        from framework.plan.cluster import topology_of

        topology = Topology()
        if self.cluster is not None:
            topology = topology_of(self.cluster, self.gpu)
        elif self.gpu is not None:
            topology = Topology(device=self.gpu.device, gpu=self.gpu)
        return Target(self.release, self.reader, topology)


def check_file(file: str, overrides: Sequence[str], against: CheckContext) -> CheckResult:
    """Check one file; its problems are in the result, also if it cannot be read. The file is read
    once, because it may be a pipe.

    Raises:
        UsageError: there are `overrides`, and the file is DeepSpeed JSON.
    """
    try:
        text = read_text(Path(file), name=file)
        document = None
        if Path(file).suffix.lower() not in YAML_ENDINGS:
            from framework.imports.kind_of_file import parse_deepspeed_json

            document = parse_deepspeed_json(text, Path(file), name=file)
        if document is None:
            return _check_run_config(file, overrides, against, text)
    except ConfigError as error:
        return CheckResult(file, tuple(error.problems))
    if overrides:
        raise UsageError(f"{file}: settings apply to run configs; this is DeepSpeed JSON")
    return check_json(document, against.target())


def check_json(document: Document, target: Target) -> CheckResult:
    """Check DeepSpeed JSON that was read."""
    from deepspeed_lint.check import check_document
    from framework.imports.kind_of_file import assumption, foreign_problem

    foreign = foreign_problem(document)
    if foreign is not None:
        return CheckResult(document.name, (foreign,))
    notes = assumption(document, as_run_config=False)
    return check_document(document, target, notes=notes)


def _check_run_config(
    file: str, overrides: Sequence[str], against: CheckContext, text: str
) -> CheckResult:
    """Check a run config with the text `text`: its plan, targets, sinks, memory, and the rendered
    JSON where that may be wrong.
    """
    from framework.commands.target_search import missing_packages, missing_targets
    from framework.load_run import load_run
    from framework.plan.plan_text import one_line

    try:
        run = load_run(file, overrides, text=text)
        target = _target(against)
        run = run.chosen(against.cluster, target, is_proposal=True)
        source = run.source
        plan = run.plan_with_data(against.cluster, data_elsewhere=against.data_elsewhere)
    except ConfigError as error:
        return _check_refused_config(file, overrides, against, text, error)
    problems = [*source.notes, *plan.findings]
    problems += map(source.locate, missing_targets(run.config))
    problems += map(source.locate, missing_packages(run.config))
    # What the framework renders of its own has no problems in the newest release.
    if plan.config.deepspeed or against.release is not None or against.gpu is not None:
        from deepspeed_lint.check import release_note
        from framework.plan.judge_passed import judge_rendered

        problems = [*release_note(file, against.release), *problems]
        problems += judge_rendered(plan, source=source, release=against.release, gpu=against.gpu)
    held_against = target
    if held_against is None and against.host_bytes is not None:
        from framework.plan.hardware import Hardware

        held_against = Hardware(host_bytes=against.host_bytes)
    too_large, estimates = _held_against(plan, held_against)
    problems += map(source.locate, too_large)
    summary = one_line(plan, fits=not too_large)
    if run.choice:
        summary += f"; {run.choice}"
    else:
        summary += estimates
    return CheckResult(file, tuple(problems), summary)


def _check_refused_config(
    file: str, overrides: Sequence[str], against: CheckContext, text: str, error: ConfigError
) -> CheckResult:
    """Find everything else that is wrong with a run config that cannot be planned.

    Args:
        file: its name.
        overrides: settings of the command line.
        against: what it is judged against.
        text: what it holds.
        error: why it cannot be planned.
    """
    from deepspeed_lint.check import by_place
    from deepspeed_lint.templates import without_placeholders
    from framework.config.load import Source
    from framework.imports.kind_of_file import assumption, foreign_problem, with_last_of_duplicates
    from framework.plan.judge_passed import judge_passed_alone

    is_yaml = Path(file).suffix.lower() in YAML_ENDINGS
    document = with_last_of_duplicates(text, error, name=file, is_yaml=is_yaml)
    if not document:
        document = _document(text, file)
    foreign = foreign_problem(document)
    if foreign is not None:
        return CheckResult(file, (foreign,))
    if isinstance(document.value, dict):
        deepspeed_section = document.value.get("deepspeed")
    else:
        deepspeed_section = None
    passed_problems = judge_passed_alone(deepspeed_section, release=against.release)
    further_errors = _errors_of_known(document, overrides, against)
    problems = sorted(_once_per_key(error.problems, further_errors), key=by_place)
    problems = _once_per_key(problems, map(Source(document).locate, passed_problems))
    problems = without_placeholders(problems, file=file)
    notes = list(assumption(document, as_run_config=True))
    return CheckResult(file, tuple(notes + problems))


def _document(text: str, file: str) -> Document:
    from deepspeed_lint.templates import template_problem
    from deepspeed_lint.text.document import document_of

    try:
        return document_of(text, Path(file), name=file)
    except ConfigError as error:
        template = template_problem(text, file=file)
        raise ConfigError(template or error.problems) from None


def _held_against(plan: Plan, target: Hardware | None) -> tuple[list[Problem], str]:
    """Hold the estimate of a known model's plan against the devices and hosts.

    Returns:
        A warning if it does not fit, and what it was held against, in words; both empty if the
        devices or the memory of the plan are not known.
    """
    if target is None:
        return [], ""
    from framework.plan.alternatives import size_text
    from framework.plan.memory import NotEstimatedError, estimate

    try:
        memory = target.with_beside(estimate(plan), plan)
    except NotEstimatedError:
        return [], ""
    usable = target.usable_text(memory)
    text = ""
    if usable:
        text = f"; {size_text(memory.total(memory.peak))} of {usable}, by estimate"
    ranks = plan.cluster.devices_per_host
    on_host = target.host_text(memory, ranks)
    if on_host:
        text += f"; {on_host}"
    reason = target.lacking(memory, ranks)
    if not reason:
        return [], text
    search = "plan --search"
    if target.name:
        search += f" --gpu {target.name}"
    warning = Problem(
        "memory-too-small",
        f"{reason}, by estimate",
        f"`{search}` finds what fits",
        "zero.stage",
        plan.config.zero.stage,
        severity="warning",
    )
    return [warning], text


def _target(against: CheckContext) -> Hardware | None:
    """Return the hardware of ``--gpu``, or None without it."""
    if against.gpu is None:
        return None
    from framework.plan.auto import listed_target

    if against.cluster is not None:
        devices_per_host = against.cluster.devices_per_host
    else:
        devices_per_host = 1
    return listed_target(
        against.gpu.name, devices_per_host=devices_per_host, host_bytes=against.host_bytes
    )


def _errors_of_known(
    document: Document, overrides: Sequence[str], against: CheckContext
) -> list[Problem]:
    """Return the errors of the sections that can be read, beside others that cannot; empty if none
    can.
    """
    from framework.config.load import load_known
    from framework.plan.known_sections import errors_of_known

    try:
        config, unknown, source = load_known(document, overrides)
    except ConfigError:
        return []
    return errors_of_known(config, unknown, against.cluster, source=source)


def _once_per_key(problems: Sequence[Problem], further: Iterable[Problem]) -> list[Problem]:
    """Return `problems`, then each of `further` with a key that no problem has."""
    reported_keys = {problem.key for problem in problems}
    return [*problems, *(problem for problem in further if problem.key not in reported_keys)]
