"""Judges one file: a run config or any DeepSpeed JSON. What is wrong with it is in the verdict, never raised.

Either kind of file needs modules that the other does not, and importing them is most of the time that checking one file
takes (`benchmarks/check_speed.py`): they are imported where they are used.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import framework
from framework.config.base import Target
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem, UsageError
from framework.text.document import YAML_ENDINGS, Document, read_text

if TYPE_CHECKING:
    from framework.dslint.facts import GpuKind, Topology
    from framework.dslint.readers import Reader
    from framework.plan.cluster import Cluster
    from framework.text.hjson import HjsonDocument

# Looks for the modules that a run config names, without importing anything: `check` executes nobody's code. What is
# not found is a warning: the machine that trains may have it. Only what names its place for sure is said; a package
# that computes its contents when it is imported is believed.


# Come with the train extra, which a laptop need not have.
_OF_TRAINING: Final = frozenset({"torch", "torchvision", "deepspeed", "numpy", "sklearn", "PIL"})
_ENDINGS: Final = tuple(importlib.machinery.all_suffixes())


def missing_targets(config: RunConfig) -> Iterator[Problem]:
    """A warning for each target whose module is nowhere that train.py would look."""
    for name in type(config).model_fields:
        section = getattr(config, name)
        target = getattr(section, "target", None) if isinstance(section, Target) else None
        missing = _missing_module(target.partition(":")[0]) if isinstance(target, str) else None
        if missing is not None:
            yield Problem(
                kind="target-not-found",
                key=f"{name}.target",
                value=target,
                severity="warning",
                reason=f"there is no module {missing} here",
                fix=f"check the spelling, or start where {missing.partition('.')[0]} can be imported",
            )


def _missing_module(module: str) -> str | None:
    """The first part of a dotted name that is nowhere; None where all of it is found, or nobody can tell."""
    parts = module.split(".")
    if parts[0] in _OF_TRAINING:
        return None
    try:
        spec = _find_top(parts[0])
    except (ImportError, ValueError, AttributeError):  # a finder of somebody's own, or a module without a spec
        return None
    if spec is None:
        return parts[0]
    places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    for depth, part in enumerate(parts[1:], start=2):
        if places is None:
            return ".".join(parts[:depth])  # inside of a single file
        if not any(Path(place).is_dir() for place in places):
            return None  # in an archive, or made up by a finder
        found = _inside(places, part)
        if found is None:
            return ".".join(parts[:depth])
        places = found or None
    return None


def _find_top(name: str) -> importlib.machinery.ModuleSpec | None:
    """Of a name without dots, finding imports nothing. train.py looks in its own folder and in the current one
    first.
    """
    own = str(Path(framework.__file__).parents[1])
    spec = importlib.machinery.PathFinder.find_spec(name, [os.getcwd(), own])
    return spec or importlib.util.find_spec(name)


def _inside(places: Sequence[str], part: str) -> list[str] | None:
    """Folders of a package in another one, none for a single file; None where it is neither."""
    folders = [str(path) for place in places if (path := Path(place, part)).is_dir()]
    if folders:
        return folders
    return [] if any(Path(place, part + ending).is_file() for place in places for ending in _ENDINGS) else None


@dataclass(frozen=True)
class CheckContext:
    """What files are judged against.

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
            return Topology(device="cuda" if self.gpu else "unknown", gpu=self.gpu)
        return Topology.from_cluster(self.cluster, self.gpu)


@dataclass(frozen=True)
class Verdict:
    """What was found in one file; `praise` is the line to print where nothing stops it."""

    file: str
    problems: tuple[Problem, ...]
    summary: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether nothing would stop it."""
        return all(problem.severity != "error" for problem in self.problems)


def find_gpu(name: str | None) -> GpuKind | None:
    """A GPU by its name, such as ``h100-80gb``.

    Raises:
        UsageError: it is not known.
    """
    if name is None:
        return None
    from framework.dslint.facts import GPU_KINDS

    if name.lower() not in GPU_KINDS:
        raise UsageError(f"--gpu {name}: not known; known are {', '.join(GPU_KINDS)}")
    return GPU_KINDS[name.lower()]


def check_file(file: str, overrides: Sequence[str], against: CheckContext) -> Verdict:
    """Judge one file. It is read once: it may be a pipe, which can be read only once."""
    try:
        text = read_text(Path(file), name=file)
        document = _deepspeed_json(text, file)
        if document is None:
            return _check_run_config(file, overrides, against, text)
    except ConfigError as error:
        return Verdict(file, tuple(error.problems))
    if overrides:
        raise UsageError(f"{file}: settings apply to run configs; this is DeepSpeed JSON")
    return check_document(document, against)


def _deepspeed_json(text: str, file: str) -> HjsonDocument | None:
    if Path(file).suffix.lower() in YAML_ENDINGS:
        return None
    from framework.dslint.judge import parse_deepspeed_json

    return parse_deepspeed_json(text, Path(file), name=file)


def check_document(document: HjsonDocument, against: CheckContext) -> Verdict:
    """Judge DeepSpeed JSON that was read."""
    from framework.dslint.judge import assumption, foreign_problem
    from framework.dslint.keys import load_table
    from framework.dslint.lint import lint, placed
    from framework.dslint.readers import NAMES, as_read, reader_of

    if (foreign := foreign_problem(document)) is not None:
        return Verdict(document.name, (foreign,))
    table = load_table(against.release)
    reader, assumed = reader_of(document) if against.reader is None else (against.reader, None)
    as_it_reads, further = as_read(document, document.text, reader, table)
    found = [
        *(problem if problem.line else placed(document, problem) for problem in further),
        *lint(as_it_reads, release=against.release, topology=against.topology(), reader=reader),
    ]
    first = "" if reader == "deepspeed" else f"{NAMES[reader]} and "
    notes = [
        *_release_note(document.name, against),
        *assumption(document, as_run_config=False),
        *([assumed] if assumed else ()),
    ]
    return Verdict(document.name, (*notes, *sorted(found, key=_place)), f"fine for {first}DeepSpeed {table.release}")


def _check_run_config(file: str, overrides: Sequence[str], against: CheckContext, text: str) -> Verdict:
    from framework.config.load import Source, load_with_source
    from framework.dslint.judge import assumption, foreign_problem, judge_passed_alone, judge_rendered
    from framework.plan.plan import default_cluster
    from framework.plan.text import one_line
    from framework.plan.token_folder import plan_with_text
    from framework.text.document import document_of

    try:
        config, source = load_with_source(file, overrides, text=text)
        cluster = against.cluster or default_cluster(config)
        plan = plan_with_text(config, cluster, source=source, data_elsewhere=against.data_elsewhere)
    except ConfigError as error:
        document = document_of(text, Path(file), name=file)
        if (foreign := foreign_problem(document)) is not None:
            return Verdict(file, (foreign,))
        passed = document.value.get("deepspeed") if isinstance(document.value, dict) else None
        further = judge_passed_alone(passed, release=against.release)
        reported = sorted(_all(error.problems, _errors_of_known(document, overrides, against)), key=_place)
        found = _all(reported, map(Source(document).locate, further))
        return Verdict(file, (*assumption(document, as_run_config=True), *found))
    problems = [*source.notes(), *plan.findings, *map(source.locate, missing_targets(config))]
    problems += judge_rendered(plan, source=source, release=against.release, gpu=against.gpu)
    return Verdict(file, (*_release_note(file, against), *problems), one_line(plan))


def _errors_of_known(document: Document, overrides: Sequence[str], against: CheckContext) -> list[Problem]:
    """What can be said beside the sections that cannot be read."""
    from framework.config.load import load_known
    from framework.plan.partial import errors_of_known

    try:
        config, unknown, source = load_known(document, overrides)
    except ConfigError:
        return []
    return errors_of_known(config, unknown, against.cluster, source=source)


def _release_note(file: str, against: CheckContext) -> Iterator[Problem]:
    """Not every patch has a table."""
    from framework.dslint.keys import load_table

    if against.release is None:
        return
    judged = load_table(against.release).release
    written = against.release.strip().removeprefix("v").partition("+")[0]
    if judged != written and not judged.startswith(f"{written}."):
        yield Problem(
            kind="release-without-table",
            file=file,
            severity="note",
            reason=f"there is no table of DeepSpeed {written}, so {judged} was taken",
            fix="check the keys that it names",
        )


def _place(problem: Problem) -> tuple[str, int, int]:
    return problem.file or "", problem.line, problem.column


def _all(found: Sequence[Problem], further: Iterable[Problem]) -> tuple[Problem, ...]:
    """Both, each key once."""
    reported = {problem.key for problem in found}
    return (*found, *(problem for problem in further if problem.key not in reported))
