"""`lint`: everything that is wrong with a DeepSpeed JSON, judged against one release of DeepSpeed.

Each key is held against the key table (does this release read it, of what type, in which range),
and the keys together against the rules. What DeepSpeed refuses or breaks on is an error; so is what
it drops in silence, as the writer of a key wants it read. What it takes and does otherwise is a
warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from deepspeed_lint.errors import Problem
from deepspeed_lint.facts import Facts
from deepspeed_lint.key_checker import KeyChecker
from deepspeed_lint.keys import load_table
from deepspeed_lint.readers import Reader, judged_for
from deepspeed_lint.rules import apply_rules
from deepspeed_lint.text.document import Document, KeyPath
from deepspeed_lint.topology import Topology
from deepspeed_lint.values import torch_problems

_UNREAD_KINDS: Final = ("unknown-key", "dotted-key", "comment-key")


def lint(
    document: Document,
    *,
    release: str | None = None,
    topology: Topology | None = None,
    reader: Reader = "deepspeed",
) -> list[Problem]:
    """Return all problems of a DeepSpeed JSON, in the order of the file.

    Args:
        document: what was read, with the places of its keys.
        release: DeepSpeed's version; left out: the newest known.
        topology: where it is to run, as far as it is known.
        reader: who reads it first.

    Raises:
        UsageError: there is no table of that release.
    """
    table = load_table(release)
    if not isinstance(document.value, Mapping):
        return [_no_object(document)]
    facts = Facts(document.value, table.release, topology or Topology())
    of_keys = list(KeyChecker(table, facts).problems())
    key_alone = [problem for _, problem in of_keys]
    together = _problems_of_settings(facts, key_alone)
    judged = judged_for(key_alone + together, document.value, reader)
    # Problems of keys know their path; a name in it may hold a dot.
    paths = {id(problem): path for path, problem in of_keys}
    distinct: dict[str, Problem] = {}
    for problem in judged:
        path = paths.get(id(problem), tuple(problem.key.split(".")))
        at_its_key = placed(document, problem, path)
        distinct[str(at_its_key)] = at_its_key
    return sorted(
        distinct.values(), key=lambda problem: (problem.line, problem.column, problem.kind)
    )


def _no_object(document: Document) -> Problem:
    reason = "a DeepSpeed config is an object of keys"
    return Problem(
        kind="config-syntax",
        file=document.name,
        line=1,
        column=1,
        reason=reason,
        fix="start with {",
    )


def _problems_of_settings(facts: Facts, key_problems: list[Problem]) -> list[Problem]:
    """Return what torch's classes and the rules refuse.

    A section that DeepSpeed does not read is neither filled in nor broken on, so "auto" in it is no
    problem.
    """
    unread = tuple(f"{problem.key}." for problem in key_problems if problem.kind in _UNREAD_KINDS)
    problems = list(torch_problems(facts.values)) + apply_rules(facts)
    return [
        problem
        for problem in problems
        if problem.kind != "auto-value" or not problem.key.startswith(unread)
    ]


def key_problems(document: Document, *, release: str | None = None) -> list[Problem]:
    """Return the problems of keys by themselves: unknown, removed, of a wrong type or value.

    Keys that are missing are no problem here, and rules are left out.

    Args:
        document: the values, which may be a part of a config.
        release: DeepSpeed's version; left out: the newest known.
    """
    table = load_table(release)
    problems = []
    for path, problem in KeyChecker(table, Facts(document.value, table.release)).problems():
        if problem.kind != "missing-key":
            problems.append(placed(document, problem, path))
    return problems


def placed(
    document: Document, problem: Problem, path: KeyPath | None = None, *, at_top: bool = True
) -> Problem:
    """Return the problem at its key, or at the nearest section around it.

    Args:
        document: the file, with the places of its keys.
        problem: the problem.
        path: the path of its key; by default its dotted key, split.
        at_top: whether a problem without a place stands at the top of the file, or nowhere.
    """
    if path is None:
        path = tuple(problem.key.split("."))
    line, column = _nearest_place(document, path) or _place_of_file(document, at_top=at_top)
    return replace(problem, file=document.name, line=line, column=column)


def _nearest_place(document: Document, path: KeyPath) -> tuple[int, int] | None:
    for length in range(len(path), 0, -1):
        place = _place(document, path[:length])
        if place is not None:
            return place
    return None


def _place_of_file(document: Document, *, at_top: bool) -> tuple[int, int]:
    if at_top:
        return document.places.get((), (1, 1))
    return 0, 0


def _place(document: Document, path: KeyPath) -> tuple[int, int] | None:
    if path in document.places:
        return document.places[path]
    return document.places.get(_with_indices(path))


def _with_indices(path: KeyPath) -> KeyPath:
    return tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in path)
