"""Judges one file: a run config or any DeepSpeed JSON. What is wrong with it is in the verdict,
never raised.

Either kind of file needs modules that the other does not, and importing them is most of the time
that checking one file takes (`benchmarks/check_speed.py`): they are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import ConfigError, Problem, UsageError
from framework.text.document import YAML_ENDINGS, Document, read_text

if TYPE_CHECKING:
    from framework.dslint.facts import GpuKind, Topology
    from framework.dslint.readers import Reader
    from framework.plan.cluster import Cluster
    from framework.plan.plan import Plan
    from framework.plan.search import Hardware


@dataclass(frozen=True)
class CheckContext:
    """Context that files are judged against.

    Attributes:
        cluster: where they are to run; None: not said.
        gpu: which GPU; None: not said.
        release: DeepSpeed's version; None: the newest known.
        reader: who reads DeepSpeed JSON first; None: the file shows it.
        data_elsewhere: data that is not here is a warning, no error.
    """

    cluster: Cluster | None = None
    gpu: GpuKind | None = None
    release: str | None = None
    reader: Reader | None = None
    data_elsewhere: bool = False

    def topology(self) -> Topology:
        """As the rules of DeepSpeed JSON take it."""
        from framework.dslint.facts import Topology

        if self.cluster is None:
            return Topology(device=self.gpu.device if self.gpu else "unknown", gpu=self.gpu)
        return Topology.from_cluster(self.cluster, self.gpu)


@dataclass(frozen=True)
class Verdict:
    """Verdict on one file; `summary` is the line to print where nothing stops it."""

    file: str
    problems: tuple[Problem, ...]
    summary: str = ""

    @property
    def is_fine(self) -> bool:
        """Check whether nothing would stop it."""
        return all(problem.severity != "error" for problem in self.problems)


def find_gpu(name: str | None) -> GpuKind | None:
    """A GPU by its name, such as ``h100-80gb``.

    Raises:
        UsageError: it is not known.
    """
    if name is None:
        return None
    from framework.dslint.facts import gpu_kinds
    from framework.plan.devices import find_device

    return gpu_kinds()[find_device(name).name]


def check_file(file: str, overrides: Sequence[str], against: CheckContext) -> Verdict:
    """Judge one file. It is read once: it may be a pipe, which can be read only once."""
    try:
        text = read_text(Path(file), name=file)
        document = None
        if Path(file).suffix.lower() not in YAML_ENDINGS:
            from framework.dslint.readers import parse_deepspeed_json

            document = parse_deepspeed_json(text, Path(file), name=file)
        if document is None:
            return _check_run_config(file, overrides, against, text)
    except ConfigError as error:
        return Verdict(file, tuple(error.problems))
    if overrides:
        raise UsageError(f"{file}: settings apply to run configs; this is DeepSpeed JSON")
    return check_document(document, against)


def check_document(document: Document, against: CheckContext) -> Verdict:
    """Judge DeepSpeed JSON that was read."""
    from framework.dslint.keys import load_table
    from framework.dslint.lint import lint, placed
    from framework.dslint.other_tools import without_placeholders
    from framework.dslint.readers import NAMES, as_read, assumption, foreign_problem, reader_of

    foreign = foreign_problem(document)
    if foreign is not None:
        return Verdict(document.name, (foreign,))
    table = load_table(against.release)
    reader, assumed = reader_of(document) if against.reader is None else (against.reader, None)
    as_it_reads, further = as_read(document, document.text, reader, table)
    found = [
        *(problem if problem.line else placed(document, problem) for problem in further),
        *lint(as_it_reads, release=against.release, topology=against.topology(), reader=reader),
    ]
    found = without_placeholders(found, file=document.name)
    if reader == "deepspeed":
        first = ""
    else:
        first = f"{NAMES[reader]} and "
    notes = [
        *_release_note(document.name, against),
        *assumption(document, as_run_config=False),
        *([assumed] if assumed else ()),
    ]
    return Verdict(
        document.name,
        (*notes, *sorted(found, key=_place)),
        f"fine for {first}DeepSpeed {table.release}",
    )


def _check_run_config(
    file: str, overrides: Sequence[str], against: CheckContext, text: str
) -> Verdict:
    from framework.commands.target_search import missing_sinks, missing_targets
    from framework.config.load import Source
    from framework.dslint.judge import judge_passed_alone, judge_rendered
    from framework.dslint.other_tools import without_placeholders
    from framework.dslint.readers import assumption, foreign_problem, with_last_of_duplicates
    from framework.load_run import load_run
    from framework.plan.plan import one_line

    try:
        run = load_run(file, overrides, text=text)
        target = _target(against)
        run = run.chosen(against.cluster, target, is_proposal=True)
        source = run.source
        plan = run.plan_with_data(against.cluster, data_elsewhere=against.data_elsewhere)
    except ConfigError as error:
        is_yaml = Path(file).suffix.lower() in YAML_ENDINGS
        document = with_last_of_duplicates(text, error, name=file, is_yaml=is_yaml) or _document(
            text, file
        )
        foreign = foreign_problem(document)
        if foreign is not None:
            return Verdict(file, (foreign,))
        if isinstance(document.value, dict):
            passed = document.value.get("deepspeed")
        else:
            passed = None
        further = judge_passed_alone(passed, release=against.release)
        reported = sorted(
            _all(error.problems, _errors_of_known(document, overrides, against)), key=_place
        )
        found = without_placeholders(
            _all(reported, map(Source(document).locate, further)), file=file
        )
        return Verdict(file, (*assumption(document, as_run_config=True), *found))
    absent = map(source.locate, (*missing_targets(run.config), *missing_sinks(run.config)))
    problems = [*source.notes, *plan.findings, *absent]
    problems += judge_rendered(plan, source=source, release=against.release, gpu=against.gpu)
    problems += map(source.locate, _too_large(plan, target))
    return Verdict(
        file,
        (*_release_note(file, against), *problems),
        "; ".join(filter(None, (one_line(plan), run.choice))),
    )


def _document(text: str, file: str) -> Document:
    from framework.dslint.other_tools import template_problem
    from framework.text.document import document_of

    try:
        return document_of(text, Path(file), name=file)
    except ConfigError as error:
        template = template_problem(text, file=file)
        raise ConfigError(template or error.problems) from None


def _too_large(plan: Plan, target: Hardware | None) -> Iterator[Problem]:
    """A plan of a known model that does not fit the device."""
    from framework.plan.memory import NotEstimatedError, estimate

    if target is None:
        return
    with suppress(NotEstimatedError):
        reason = target.lacking(target.with_beside(estimate(plan), plan))
        if reason:
            fix = f"`plan --search --gpu {target.name}` finds what fits"
            stage = plan.config.zero.stage
            yield Problem(
                "memory-too-small",
                f"{reason}, by estimate",
                fix,
                "zero.stage",
                stage,
                severity="warning",
            )


def _target(against: CheckContext) -> Hardware | None:
    if against.gpu is None:
        return None
    from framework.plan.auto import listed_target

    return listed_target(
        against.gpu.name,
        devices_per_host=against.cluster.devices_per_host if against.cluster else 1,
    )


def _errors_of_known(
    document: Document, overrides: Sequence[str], against: CheckContext
) -> list[Problem]:
    """Those of the sections that can be read, beside those that cannot."""
    from framework.config.load import load_known
    from framework.plan.plan import errors_of_known

    try:
        config, unknown, source = load_known(document, overrides)
    except ConfigError:
        return []
    return errors_of_known(config, unknown, against.cluster, source=source)


def _release_note(file: str, against: CheckContext) -> Iterator[Problem]:
    from framework.dslint.keys import load_table

    if against.release is None:
        return
    judged = load_table(against.release).release
    written = against.release.strip().removeprefix("v").partition("+")[0]
    if judged != written and not judged.startswith(f"{written}."):
        reason = f"there is no table of DeepSpeed {written}, so {judged} was taken"
        fix = "check the keys that it names"
        yield Problem("release-without-table", reason, fix, file=file, severity="note")


def _place(problem: Problem) -> tuple[str, int, int]:
    return problem.file or "", problem.line, problem.column


def _all(found: Sequence[Problem], further: Iterable[Problem]) -> tuple[Problem, ...]:
    """Both, each key once."""
    reported = {problem.key for problem in found}
    return (*found, *(problem for problem in further if problem.key not in reported))
