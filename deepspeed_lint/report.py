"""The result of a check, and what is printed of it: lines for people, JSON for tools, annotations
for GitHub.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from deepspeed_lint.errors import EXIT_OK, EXIT_PROBLEMS, Problem, painted_for, visible

Format = Literal["text", "json", "github"]
FORMATS: Final[tuple[Format, ...]] = ("text", "json", "github")
_GITHUB_COMMANDS: Final = {"error": "error", "warning": "warning", "note": "notice"}


@dataclass(frozen=True)
class CheckResult:
    """What is wrong with one file; `summary` is the line to print if nothing stops it."""

    file: str
    problems: tuple[Problem, ...]
    summary: str = ""

    @property
    def is_fine(self) -> bool:
        """Check that no problem is an error."""
        return all(problem.severity != "error" for problem in self.problems)


def report(results: Sequence[CheckResult], format_: Format, *, on_stdout: bool = True) -> int:
    """Print the results of files, and return the exit code: 0, or 2 if there are errors.

    Args:
        results: one for each file.
        format_: who reads the output.
        on_stdout: whether to print the summaries of files without errors, as text.
    """
    problems: list[Problem] = []
    for result in results:
        problems += result.problems
    fine_files = [result for result in results if result.is_fine]
    if format_ == "json":
        print(json.dumps([problem.to_dict() for problem in problems], indent=2))
    elif format_ == "github":
        print("\n".join(map(_as_github, problems)))
    else:
        if fine_files and on_stdout:
            summaries = [f"{result.file}: {result.summary}" for result in fine_files]
            print(visible("\n".join(summaries)), file=sys.stdout)
        if problems:
            lines = visible("\n".join(map(as_text, problems)))
            print(painted_for(sys.stderr, lines), file=sys.stderr)
    if len(fine_files) == len(results):
        return EXIT_OK
    return EXIT_PROBLEMS


def as_text(problem: Problem) -> str:
    """Return the problem's line with its column: many editors and terminals open a file there."""
    text = str(problem)
    place = f"{problem.file}:{problem.line}:"
    if problem.column and text.startswith(place):
        text = f"{place}{problem.column}:{text.removeprefix(place)}"
    if problem.severity == "error":
        return text
    return f"{problem.severity}: {text}"


def _as_github(problem: Problem) -> str:
    """Return a workflow command, which GitHub shows beside the line in a pull request."""
    command = _GITHUB_COMMANDS[problem.severity]
    file = _escaped(problem.file, "%\r\n:,")
    title = _escaped(problem.kind, "%\r\n:,")
    place = f"file={file},line={problem.line or 1},col={problem.column or 1}"
    message = _escaped(str(problem), "%\r\n")
    return f"::{command} {place},title={title}::{message}"


def _escaped(text: str, characters: str) -> str:
    return text.translate({ord(character): f"%{ord(character):02X}" for character in characters})
