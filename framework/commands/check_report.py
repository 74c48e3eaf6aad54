"""Output of verdicts: for people, for tools, and for GitHub."""

from __future__ import annotations

import json
from collections.abc import Sequence

from framework.commands.verdict import Verdict
from framework.errors import Problem


def as_text(verdicts: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """Lines for stdout (what is fine) and stderr (what is not)."""
    fine = [f"{verdict.file}: {verdict.summary}" for verdict in verdicts if verdict.is_fine]
    found = [
        _line(problem) if problem.severity == "error" else f"{problem.severity}: {_line(problem)}"
        for verdict in verdicts
        for problem in verdict.problems
    ]
    return fine, found


def _line(problem: Problem) -> str:
    """The problem with its column, which many editors and terminals open a file at."""
    text, place = str(problem), f"{problem.file}:{problem.line}:"
    return f"{place}{problem.column}:{text.removeprefix(place)}" if problem.column and text.startswith(place) else text


def as_json(verdicts: Sequence[Verdict]) -> str:
    """All problems as a JSON list."""
    return json.dumps([problem.to_dict() for verdict in verdicts for problem in verdict.problems], indent=2)


def as_github(verdicts: Sequence[Verdict]) -> list[str]:
    """Workflow commands: GitHub shows them beside the line in a pull request."""
    commands = {"error": "error", "warning": "warning", "note": "notice"}
    return [
        f"::{commands[problem.severity]} "
        f"file={_property(problem.file)},line={problem.line or 1},col={problem.column or 1},"
        f"title={_property(problem.kind)}::{_data(str(problem))}"
        for verdict in verdicts
        for problem in verdict.problems
    ]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
