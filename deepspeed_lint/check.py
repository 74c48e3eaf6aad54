"""The check of one DeepSpeed JSON, from its text to its problems, which are returned and never
raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from deepspeed_lint.errors import ConfigError, Problem
from deepspeed_lint.keys import load_table
from deepspeed_lint.lint import lint, placed
from deepspeed_lint.readers import NAMES, as_read, reader_of
from deepspeed_lint.report import CheckResult
from deepspeed_lint.templates import template_problem, without_placeholders
from deepspeed_lint.text.document import Document, read_text
from deepspeed_lint.text.hjson import parse_hjson
from deepspeed_lint.topology import Target


def read_config(path: Path, *, name: str) -> Document:
    """Read a DeepSpeed JSON; `name` is that of the file in messages.

    Raises:
        ConfigError: it cannot be read, or is neither JSON nor Hjson.
    """
    return parse_config(read_text(path, name=name), name=name)


def parse_config(text: str, *, name: str) -> Document:
    """Parse the text of a DeepSpeed JSON, as `read_config` does."""
    try:
        return parse_hjson(text, name=name)
    except ConfigError:
        template = template_problem(text, file=name)
        if template is not None:
            raise ConfigError(template) from None
        raise


def check_document(
    document: Document, target: Target, *, notes: Iterable[Problem] = ()
) -> CheckResult:
    """Check a DeepSpeed JSON that was read.

    Args:
        document: the file.
        target: what it is judged against.
        notes: further notes on the file, which stand before its problems.
    """
    table = load_table(target.release)
    reader = target.reader
    assumed_reader = None
    if reader is None:
        reader, assumed_reader = reader_of(document)
    document_as_read, reading_problems = as_read(document, document.text, reader, table)
    problems = [_with_place(document, problem) for problem in reading_problems]
    problems += lint(
        document_as_read, release=target.release, topology=target.topology, reader=reader
    )
    problems = without_placeholders(problems, file=document.name)
    all_notes = list(release_note(document.name, target.release))
    all_notes += notes
    if assumed_reader is not None:
        all_notes.append(assumed_reader)
    if reader == "deepspeed":
        programs = "DeepSpeed"
    else:
        programs = f"{NAMES[reader]} and DeepSpeed"
    return CheckResult(
        document.name,
        tuple(all_notes + sorted(problems, key=by_place)),
        f"fine for {programs} {table.release}",
    )


def _with_place(document: Document, problem: Problem) -> Problem:
    if problem.line:
        return problem
    return placed(document, problem)


def release_note(file: str, release: str | None) -> Iterator[Problem]:
    """Yield a note if another release's table stands for the one that was named."""
    if release is None:
        return
    judged = load_table(release).release
    written = release.strip().removeprefix("v").partition("+")[0]
    if judged != written and not judged.startswith(f"{written}."):
        reason = f"there is no table of DeepSpeed {written}, so {judged} was taken"
        fix = "check the keys that it names"
        yield Problem("release-without-table", reason, fix, file=file, severity="note")


def by_place(problem: Problem) -> tuple[str, int, int]:
    """Sort key: the order of the file."""
    return problem.file, problem.line, problem.column
