"""`lint`: everything that is wrong with a DeepSpeed JSON, judged against one release of DeepSpeed.

Each key is held against the key table (does this release read it, of what type, in which range),
and the keys together against the rules. What DeepSpeed refuses or breaks on is an error; so is what
it drops in silence, because nobody writes a key to have it dropped. What it takes and does
otherwise is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, Final

from framework.dslint.facts import Facts, Topology, dotted
from framework.dslint.key_files import TYPED_SECTIONS, known_releases, variant_of, without_variant
from framework.dslint.keys import Key, KeyTable, history, load_table
from framework.dslint.readers import Reader, judged_for
from framework.dslint.rules import apply_rules
from framework.dslint.values import Fault, class_mismatch, torch_problems, value_faults
from framework.errors import MISSING, Problem, Severity
from framework.text.document import Document, KeyPath

# Names that people give to comments; a key of DeepSpeed is none of them.
_COMMENT: Final = re.compile(
    r"//.*|#.*|[_$-]*comments?[_-]?\d*|[_$].*comment.*|_+(?:note|doc|description|readme|todo).*",
    re.IGNORECASE,
)
# Where editors find a JSON Schema; DeepSpeed drops it, and nobody writes it for DeepSpeed.
_SCHEMA: Final = ("$schema",)
_USELESS: Final = {
    "deprecated": "DeepSpeed keeps it for old files only",
    "inert": "DeepSpeed reads it and does nothing with it",
}


def lint(
    document: Document,
    *,
    release: str | None = None,
    topology: Topology | None = None,
    reader: Reader = "deepspeed",
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
        return [
            Problem(
                kind="config-syntax",
                file=document.name,
                line=1,
                column=1,
                reason=reason,
                fix="start with {",
            )
        ]
    facts = Facts(document.value, table.release, topology or Topology())
    found = list(_Keys(table, facts).problems())
    # what is in a section that nobody reads is neither filled in nor broken on
    unread = tuple(
        f"{problem.key}."
        for _, problem in found
        if problem.kind in ("unknown-key", "dotted-key", "comment-key")
    )
    together = [*torch_problems(document.value), *apply_rules(facts)]
    together = [
        problem
        for problem in together
        if problem.kind != "auto-value" or not problem.key.startswith(unread)
    ]
    paths = {id(problem): path for path, problem in found}
    judged = judged_for([*(problem for _, problem in found), *together], document.value, reader)
    problems = [
        (paths.get(id(problem), tuple(problem.key.split("."))), problem) for problem in judged
    ]
    distinct = {
        str(problem): problem
        for problem in (placed(document, problem, path) for path, problem in problems)
    }
    return sorted(
        distinct.values(), key=lambda problem: (problem.line, problem.column, problem.kind)
    )


def key_problems(document: Document, *, release: str | None = None) -> list[Problem]:
    """Problems of keys by themselves: unknown, removed, of a wrong type or value. What is missing,
    and rules, are left out.

    Args:
        document: the values, which may be a part of a config.
        release: DeepSpeed's version; left out: the newest known.
    """
    table = load_table(release)
    found = _Keys(table, Facts(document.value, table.release)).problems()
    return [
        placed(document, problem, path) for path, problem in found if problem.kind != "missing-key"
    ]


def placed(
    document: Document, problem: Problem, path: KeyPath | None = None, *, at_top: bool = True
) -> Problem:
    """Return the problem at its key, or at the nearest section around it; at the top of the file
    only on demand.
    """
    if path is None:
        path = tuple(problem.key.split("."))
    else:
        path = path
    line, column = (1, 1) if at_top else (0, 0)
    for length in range(len(path), -1 if at_top else 0, -1):
        spellings = (path[:length], _with_indices(path[:length]))
        found = next((one for one in spellings if one in document.places), None)
        if found is not None:
            line, column = document.places[found]
            break
    return replace(problem, file=document.name, line=line, column=column)


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
            yield from (_problem(path, fault, value) for fault in self._judge(path, value))
            if isinstance(value, Mapping):
                yield from self._missing(path, value)
                yield from self._both_names(path, value)

    def _missing(
        self, path: KeyPath, values: Mapping[str, Any]
    ) -> Iterator[tuple[KeyPath, Problem]]:
        """Keys that a section does not work without; the parameters of a type are asked once the
        type is known.
        """
        section = self._key(path)
        variant = self._variant((*path, "*"))
        if section is None or section.status == "refused" or self._is_untabled((*path, "*")):
            return
        place = dotted(path)
        tables = [
            name
            for name in self.table.variants(place)
            if variant and name.lower() == variant.lower()
        ]
        subject = (variant if path[-1] == "params" else None) or path[-1]
        for name in (
            name
            for table in (place, *(f"{place}[{kind}]" for kind in tables))
            for name in self.table.required(table)
        ):
            if name not in values and not (name == "params" and "type" not in values):
                yield _problem(
                    (*path, name), ("missing-key", f"{subject} does not work without it", "add it")
                )

    def _both_names(
        self, path: KeyPath, values: Mapping[str, Any]
    ) -> Iterator[tuple[KeyPath, Problem]]:
        """One key under two of its names, which DeepSpeed's models refuse; they drop "auto" before
        they look.
        """
        seen: dict[str, str] = {}
        for name, value in values.items():
            key = self._key((*path, name))
            if (
                key is not None
                and key.aliases
                and value != "auto"
                and (other := seen.setdefault(key.path, name)) != name
            ):
                reason = f"it is another name of {other}, which is given as well"
                yield _problem((*path, name), ("both-names", reason, "remove one of them"), value)

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
        if path:
            return self.table.get([str(part) for part in path], self._variant(path))
        return None

    def _variant(self, path: KeyPath) -> str | None:
        return variant_of(self.facts.values, path)

    def _is_untabled(self, path: KeyPath) -> bool:
        """Parameters of torch's own optimizers and schedules are torch's to know."""
        if len(path) < 3 or path[0] not in TYPED_SECTIONS or path[1] != "params":
            return False
        variant = self._variant(path)
        known = {name.lower() for name in self.table.variants(f"{path[0]}.params")}
        return variant is None or variant.lower() not in known

    def _judge(self, path: KeyPath, value: Any) -> Iterator[Fault]:
        key = self._key(path)
        if key is None:
            yield self._unknown(path, value)
        elif key.status == "refused":
            past = history(key.path)
            if past.removed:
                when = f" since {past.removed}"
            else:
                when = ""
            reason = f"DeepSpeed {self.table.release} raises an error where it is present{when}"
            yield "removed-key", reason, _instead(key.replaced_by, key.instead)
        elif value != "auto":  # the rule `auto_value` speaks of these
            if key.status in _USELESS:
                yield (
                    f"{key.status}-key",
                    _USELESS[key.status],
                    _instead(key.replaced_by, key.instead),
                    "warning",
                )
            yield from value_faults(key, value)
            mismatch = class_mismatch(self.facts, key)
            if mismatch is not None:
                yield mismatch

    def _unknown(self, path: KeyPath, value: Any) -> Fault:
        section = self._key(path[:-1])
        name = str(path[-1])
        whole = dotted(path)
        is_refused = section is not None and section.unknown == "error"
        reason = (
            f"DeepSpeed {self.table.release} "
            f"{'refuses' if is_refused else 'reads no such key and drops it in silence'}"
        )
        refused = f"{reason}{' it' if is_refused else ''}"
        if _COMMENT.fullmatch(name):
            return (
                "comment-key",
                refused,
                "write comments as // comments",
                "error" if is_refused else "warning",
            )
        if "." in name or "[" in name:
            return "dotted-key", refused, self._sections(whole, value)
        past = history(whole)
        if past.removed is not None:
            went = f"{reason}: it went {_when(past.removed)}"
            return "key-of-another-release", went, _instead(past.replaced_by, past.instead)
        if past.added is not None:
            came = f"{reason}: it came {_when(past.added)}"
            return (
                "key-of-another-release",
                came,
                f"use DeepSpeed {past.added} or newer, or remove it",
            )
        guesses = self.table.nearest([str(part) for part in path], self._variant(path))
        if guesses:
            fix = f"did you mean {' or '.join(guesses)}?"
        else:
            fix = "remove it"
        if (
            not guesses
            and isinstance(value, Mapping)
            and value
            and all(self.table.get(str(inner)) for inner in value)
        ):
            fix = f"write {', '.join(map(str, value))} without this section around it"
        return "unknown-key", refused, fix

    def _sections(self, name: str, value: Any) -> str:
        """The fix of a path where a name belongs."""
        if isinstance(value, (str, int, float, type(None))):
            nested = dumps(value)
        else:
            nested = "..."
        for part in reversed(without_variant(name).split(".")):
            nested = f'{{"{part}": {nested}}}'
        if self.table.get(name) is not None:
            return f"write it as sections: {nested}"
        return "remove it"


def _problem(path: KeyPath, fault: Fault, value: Any = MISSING) -> tuple[KeyPath, Problem]:
    kind, reason, fix, *own = fault
    severity: Severity = own[0] if own else "error"
    return path, Problem(kind, reason, fix, dotted(path), value, severity=severity)


def _when(release: str) -> str:
    """Of releases without a table nobody knows."""
    known = known_releases()
    before = known[max(0, known.index(release) - 1)]
    is_next = release.rpartition(".")[0] == before.rpartition(".")[0]
    if is_next:
        return f"with {release}"
    return f"after {before}, in {release} at the latest"


def _instead(replaced_by: tuple[str, ...], instead: str) -> str:
    return instead or (f"use {' or '.join(replaced_by)}" if replaced_by else "remove it")
