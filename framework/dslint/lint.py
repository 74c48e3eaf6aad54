"""`lint`: everything that is wrong with a DeepSpeed JSON, judged against one release of DeepSpeed.

Each key is held against the key table (does this release read it, of what type, in which range), and the keys together
against the rules. What DeepSpeed refuses or breaks on is an error; so is what it drops in silence, because nobody
writes a key to have it dropped. What it takes and does otherwise is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, Final

from framework.dslint.facts import Facts, Topology
from framework.dslint.key_files import TYPED_SECTIONS, known_releases, variant_of, without_variant
from framework.dslint.key_values import value_problems
from framework.dslint.keys import Key, KeyTable, history, load_table
from framework.dslint.parameters import class_problems, torch_problems
from framework.dslint.readers import Reader, judged_for
from framework.dslint.rules import apply_rules
from framework.errors import Problem
from framework.text.document import Document, KeyPath

# Names that people give to comments; a key of DeepSpeed is none of them.
_COMMENT: Final = re.compile(
    r"//.*|#.*|[_$-]*comments?[_-]?\d*|[_$].*comment.*|_+(?:note|doc|description|readme|todo).*", re.IGNORECASE
)
# Where editors find a JSON Schema; DeepSpeed drops it, and nobody writes it for DeepSpeed.
_SCHEMA: Final = ("$schema",)


def lint(
    document: Document, *, release: str | None = None, topology: Topology | None = None, reader: Reader = "deepspeed"
) -> list[Problem]:
    """All problems of a DeepSpeed JSON, in the order of the file.

    Args:
        document: what was read, with the places of its keys.
        release: DeepSpeed's version; left out: the newest known.
        topology: where it is to run, as far as it was said.
        reader: who reads it first.

    Raises:
        UsageError: there is no table of that release.
    """
    table = load_table(release)
    if not isinstance(document.value, Mapping):
        reason = "a DeepSpeed config is an object of keys"
        return [Problem(kind="config-syntax", file=document.name, line=1, column=1, reason=reason, fix="start with {")]
    facts = Facts(document.value, table.release, topology or Topology())
    found = list(_Keys(table, facts).problems())
    # what is in a section that nobody reads is neither filled in nor broken on
    unread = tuple(
        f"{problem.key}." for _, problem in found if problem.kind in ("unknown-key", "dotted-key", "comment-key")
    )
    together = [*torch_problems(document.value), *apply_rules(facts)]
    together = [problem for problem in together if problem.kind != "auto-value" or not problem.key.startswith(unread)]
    paths = {id(problem): path for path, problem in found}
    judged = judged_for([*(problem for _, problem in found), *together], document.value, reader)
    problems = [(paths.get(id(problem), tuple(problem.key.split("."))), problem) for problem in judged]
    distinct = {str(problem): problem for problem in (placed(document, problem, path) for path, problem in problems)}
    return sorted(distinct.values(), key=lambda problem: (problem.line, problem.column, problem.kind))


def key_problems(document: Document, *, release: str | None = None) -> list[Problem]:
    """Problems of keys by themselves: unknown, removed, of a wrong type or value. What is missing, and rules, are left
    out.

    Args:
        document: the values, which may be a part of a config.
        release: DeepSpeed's version; left out: the newest known.
    """
    table = load_table(release)
    found = _Keys(table, Facts(document.value, table.release)).problems()
    return [placed(document, problem, path) for path, problem in found if problem.kind != "missing-key"]


def placed(document: Document, problem: Problem, path: KeyPath | None = None) -> Problem:
    """Return the problem at its key, or at the nearest section around it."""
    path = tuple(problem.key.split(".")) if path is None else path
    for length in range(len(path), -1, -1):
        for spelled in (path[:length], _with_indices(path[:length])):
            if spelled in document.places:
                line, column = document.places[spelled]
                return replace(problem, file=document.name, line=line, column=column)
    return replace(problem, file=document.name, line=1, column=1)


def _with_indices(path: KeyPath) -> KeyPath:
    return tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in path)


@dataclass(frozen=True)
class _Keys:
    """Holds every key by itself against the table."""

    table: KeyTable
    facts: Facts

    def problems(self) -> Iterator[tuple[KeyPath, Problem]]:
        yield from self._missing((), self.facts.values)
        for path, value in self._walk(self.facts.values, ()):
            for problem in self._judge(path, value):
                yield path, problem
            if isinstance(value, Mapping):
                yield from self._missing(path, value)
                yield from self._both_names(path, value)

    def _missing(self, path: KeyPath, values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Problem]]:
        """Keys that a section does not work without; the parameters of a type are asked once the type is known."""
        section = self._key(path)
        if section is None or section.status == "refused" or self._is_untabled((*path, "*")):
            return
        for name in self._required(path):
            if name not in values and not (name == "params" and "type" not in values):
                dotted = ".".join(map(str, (*path, name)))
                yield (
                    (*path, name),
                    Problem(
                        kind="missing-key",
                        key=dotted,
                        reason=f"{self._name(path)} does not work without it",
                        fix="add it",
                    ),
                )

    def _name(self, path: KeyPath) -> str:
        return (self._variant((*path, "*")) if path[-1] == "params" else None) or str(path[-1])

    def _required(self, path: KeyPath) -> Iterator[str]:
        section, variant = ".".join(map(str, path)), self._variant((*path, "*"))
        for place in (section, *(f"{section}[{kind}]" for kind in self.table.variants(section))):
            if place == section or (variant is not None and place.lower() == f"{section}[{variant}]".lower()):
                yield from self.table.required(place)

    def _both_names(self, path: KeyPath, values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Problem]]:
        """One key under two of its names, which DeepSpeed's models refuse; they drop "auto" before they look."""
        seen: dict[str, str] = {}
        for name, value in values.items():
            key = self._key((*path, name))
            if key is None or not key.aliases or value == "auto":
                continue
            if seen.setdefault(key.path, name) != name:
                yield (
                    (*path, name),
                    Problem(
                        kind="both-names",
                        key=".".join(map(str, (*path, name))),
                        value=value,
                        reason=f"it is another name of {seen[key.path]}, which is given as well",
                        fix="remove one of them",
                    ),
                )

    def _walk(self, values: Mapping[str, Any], section: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        for name, value in values.items():
            path = (*section, name)
            if self._is_untabled(path) or path == _SCHEMA:
                continue
            yield path, value
            key = self._key(path)
            if key is None or key.status == "refused" or key.unknown == "free":
                continue
            if isinstance(value, Mapping):
                # where no section belongs, that is what is wrong, not what is in it
                if not key.from_python and not {"object", "any"}.isdisjoint(key.types):
                    yield from self._walk(value, path)
            elif isinstance(value, list) and self._key((*path, "0")) is not None:
                for index, item in enumerate(value):
                    yield (*path, str(index)), item
                    if isinstance(item, Mapping):
                        yield from self._walk(item, (*path, str(index)))

    def _key(self, path: KeyPath) -> Key | None:
        return self.table.get([str(part) for part in path], self._variant(path)) if path else None

    def _variant(self, path: KeyPath) -> str | None:
        return variant_of(self.facts.values, path)

    def _is_untabled(self, path: KeyPath) -> bool:
        """Parameters of torch's own optimizers and schedules are torch's to know."""
        if len(path) < 3 or path[0] not in TYPED_SECTIONS or path[1] != "params":
            return False
        variant = self._variant(path)
        known = {name.lower() for name in self.table.variants(f"{path[0]}.params")}
        return variant is None or variant.lower() not in known

    def _judge(self, path: KeyPath, value: Any) -> Iterator[Problem]:
        dotted = ".".join(map(str, path))
        key = self._key(path)
        if key is None:
            yield self._unknown(path, dotted, value)
        elif key.status == "refused":
            yield _refused(key, dotted, value, self.table.release)
        elif value != "auto":  # the rule `auto_value` speaks of these
            if key.status == "deprecated":
                yield Problem(
                    kind="deprecated-key",
                    key=dotted,
                    value=value,
                    severity="warning",
                    reason="DeepSpeed keeps it for old files only",
                    fix=_instead(key),
                )
            elif key.status == "inert":
                yield Problem(
                    kind="inert-key",
                    key=dotted,
                    value=value,
                    severity="warning",
                    reason="DeepSpeed reads it and does nothing with it",
                    fix=_instead(key),
                )
            yield from value_problems(key, dotted, value)
            yield from class_problems(self.facts, key, dotted, value)

    def _unknown(self, path: KeyPath, dotted: str, value: Any) -> Problem:
        section = self._key(path[:-1])
        refused = section is not None and section.unknown == "error"
        reason = (
            f"DeepSpeed {self.table.release} {'refuses' if refused else 'reads no such key and drops it in silence'}"
        )
        name = str(path[-1])
        if _COMMENT.fullmatch(name):
            return Problem(
                kind="comment-key",
                key=dotted,
                value=value,
                severity="error" if refused else "warning",
                reason=f"{reason}{' it' if refused else ''}",
                fix="write comments as // comments",
            )
        if "." in name or "[" in name:
            return self._dotted(dotted, value, f"{reason}{' it' if refused else ''}")
        past = history(dotted)
        if past.added is not None and past.removed is None:
            return Problem(
                kind="key-of-another-release",
                key=dotted,
                value=value,
                reason=f"{reason}: it came {_when(past.added)}",
                fix=f"use DeepSpeed {past.added} or newer, or remove it",
            )
        if past.removed is not None:
            return Problem(
                kind="key-of-another-release",
                key=dotted,
                value=value,
                reason=f"{reason}: it went {_when(past.removed)}",
                fix=_words(past.replaced_by, past.instead),
            )
        guesses = self.table.nearest([str(part) for part in path], self._variant(path))
        fix = f"did you mean {' or '.join(guesses)}?" if guesses else "remove it"
        if not guesses and isinstance(value, Mapping) and value and all(self.table.get(str(inner)) for inner in value):
            fix = f"write {', '.join(map(str, value))} without this section around it"
        return Problem(
            kind="unknown-key", key=dotted, value=value, reason=f"{reason}{' it' if refused else ''}", fix=fix
        )

    def _dotted(self, dotted: str, value: Any, reason: str) -> Problem:
        """A path where a name belongs."""
        known = self.table.get(dotted)
        nested = dumps(value) if isinstance(value, (str, int, float, type(None))) else "..."
        for part in reversed(without_variant(dotted).split(".")):
            nested = f'{{"{part}": {nested}}}'
        fix = f"write it as sections: {nested}" if known is not None else "remove it"
        return Problem(kind="dotted-key", key=dotted, value=value, reason=reason, fix=fix)


def _when(release: str) -> str:
    """Of releases without a table nobody knows."""
    known = known_releases()
    before = known[max(0, known.index(release) - 1)]
    is_next = release.rpartition(".")[0] == before.rpartition(".")[0]
    return f"with {release}" if is_next else f"after {before}, in {release} at the latest"


def _refused(key: Key, dotted: str, value: Any, release: str) -> Problem:
    past = history(key.path)
    when = f" since {past.removed}" if past.removed else ""
    return Problem(
        kind="removed-key",
        key=dotted,
        value=value,
        reason=f"DeepSpeed {release} raises an error where it is present{when}",
        fix=_instead(key),
    )


def _instead(key: Key) -> str:
    return _words(key.replaced_by, key.instead)


def _words(replaced_by: tuple[str, ...], instead: str) -> str:
    if instead:
        return instead
    return f"use {' or '.join(replaced_by)}" if replaced_by else "remove it"
