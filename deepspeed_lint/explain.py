"""What a key of DeepSpeed means, and what a kind of problem means and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from deepspeed_lint.errors import MISSING, UsageError, show_value
from deepspeed_lint.key_files import (
    TABLES,
    History,
    history,
    known_releases,
    without_variant,
)
from deepspeed_lint.keys import Key, KeyTable, load_table
from deepspeed_lint.rows import filled
from deepspeed_lint.rules import ALL
from deepspeed_lint.text.typos import nearest

_LIMITS: Final[Mapping[str, str]] = {
    "minimum": ">=",
    "exclusive_minimum": ">",
    "maximum": "<=",
    "exclusive_maximum": "<",
    "multiple_of": "a multiple of",
}
_STATUS: Final[Mapping[str, str]] = {
    "read": "",
    "inert": "inert: DeepSpeed reads it and does nothing with it",
    "deprecated": "deprecated: DeepSpeed keeps it for old files only",
    "refused": "DeepSpeed raises an error where it is present",
}
_WIDTH: Final = 11


@dataclass(frozen=True)
class Explanation:
    """What is known about a key or a kind of problem.

    Attributes:
        subject: the key or the kind.
        rows: title -> text, in the order in which they are printed.
    """

    subject: str
    rows: Mapping[str, str]

    def __str__(self) -> str:
        lines = [self.subject]
        for title, text in self.rows.items():
            first, *others = text.split("\n")
            lines.append(f"  {title:<{_WIDTH}}{first}")
            lines += [f"  {'':<{_WIDTH}}{other}" for other in others]
        return "\n".join(lines)


def explain(word: str, *, release: str | None = None) -> list[Explanation]:
    """Explain a kind of problem, or a key; a name that stands in several sections has several
    explanations.

    Args:
        word: a kind such as ``batch-arithmetic``, a dotted key, or the last part of one.
        release: DeepSpeed's version; left out: the newest known.

    Raises:
        UsageError: neither a kind nor a key has this name.
    """
    of_kind = explain_kind(word)
    if of_kind is not None:
        return [of_kind]
    table = load_table(release)
    keys = list(_find_keys(table, word))
    if not keys:
        raise UsageError(
            f"explain: no key of DeepSpeed and no kind of problem is named {word}"
            f"{_hint(word, table)}"
        )
    return [Explanation(without_variant(key.path), _rows_of_key(key, table)) for key in keys]


def explain_kind(word: str) -> Explanation | None:
    """Explain a kind of problem; None for a word that is none."""
    rows = _kinds().get(word)
    if rows is None:
        return None
    return Explanation(word, rows)


def _hint(word: str, table: KeyTable) -> str:
    guesses = table.nearest(word)
    kind = nearest(word, _kinds())
    if kind:
        guesses.insert(0, kind)
    if guesses:
        return f"; did you mean {' or '.join(guesses)}?"
    return ""


def _find_keys(table: KeyTable, word: str) -> Iterator[Key]:
    """Yield the key of a path; of a path that this release does not read, as the last release that
    did; or the keys with this name in any section.
    """
    candidates = [table]
    candidates += map(load_table, reversed(known_releases()))
    for candidate in candidates:
        key = candidate.get(word)
        if key is not None:
            yield key
            return
    if "." not in word:
        yield from _keys_named(table, word)


def _keys_named(table: KeyTable, name: str) -> Iterator[Key]:
    """Yield the keys of a name, one of each section."""
    keys: dict[str, Key] = {}
    for path in table:
        key = table.exact(path)
        if key is not None and key.name == name:
            keys.setdefault(without_variant(path), key)
    yield from keys.values()


def _rows_of_key(key: Key, table: KeyTable) -> dict[str, str]:
    path = without_variant(key.path)
    past = history(key.path)
    names = [child.removeprefix(f"{path}.") for child in table.children(path)]
    rows = {
        "meaning": key.sentence,
        "type": _type(key),
        "default": _defaults(key, table),
        "also named": ", ".join(key.aliases),
        "since": _since(past),
        "until": _until(past),
        "status": _STATUS[key.status],
        "instead": _instead(key, past),
        "keys": ", ".join(names),
        "read in": key.source,
    }
    return {title: text for title, text in rows.items() if text}


def _since(past: History) -> str:
    if past.added:
        return f"DeepSpeed {past.added}, or shortly before"
    return f"DeepSpeed {known_releases()[0]} or older"


def _until(past: History) -> str:
    if past.removed:
        return f"it went with DeepSpeed {past.removed}, or shortly before"
    return ""


def _instead(key: Key, past: History) -> str:
    replaced_by = key.replaced_by or past.replaced_by
    instead = key.instead or past.instead
    return instead or " or ".join(map(without_variant, replaced_by))


def _defaults(key: Key, table: KeyTable) -> str:
    """Return the default of a key; of a parameter, the one of each type that takes it."""
    path = without_variant(key.path)
    section = path.rpartition(".")[0]
    types_of: dict[str, list[str]] = {}
    for variant in table.variants(section):
        of_type = table.exact(f"{section}[{variant}].{key.name}")
        if of_type is not None and of_type.default is not MISSING:
            types_of.setdefault(show_value(of_type.default), []).append(variant)
    if types_of:
        return "\n".join(f"{value} ({', '.join(types)})" for value, types in types_of.items())
    if key.default is MISSING:
        return ""
    return show_value(key.default)


def _type(key: Key) -> str:
    """Return types, choices and limits of a key in words."""
    if key.enum:
        choices = list(map(show_value, key.enum))
    else:
        choices = list(key.types)
    if key.nullable:
        choices.append("null")
    parts = [" or ".join(choices)]
    parts += _limits(key)
    return ", ".join(parts)


def _limits(key: Key) -> Iterator[str]:
    for field, words in _LIMITS.items():
        limit = getattr(key, field)
        if limit is not None:
            yield f"{words} {limit}"


@cache
def _kinds() -> dict[str, dict[str, str]]:
    """Return what is known of each kind, by hand or from the row of a rule."""
    sources = {rule.__name__.replace("_", "-"): rule.__doc__ for rule in ALL}
    kinds: dict[str, dict[str, str]] = {}
    by_hand = json.loads((TABLES / "kinds.json").read_text(encoding="utf-8"))
    rows = json.loads((TABLES / "rules.json").read_text(encoding="utf-8"))
    of_rows = {name: _of_row(row) for name, row in rows.items()}
    for name, explained in (by_hand | of_rows).items():
        kinds[name] = dict(explained)
        source = sources.get(name)
        if source:
            kinds[name]["read in"] = " ".join(source.partition("\n\n")[0].split())
    return kinds


def _of_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return severity, meaning and fix of a row of rules; its cases may differ in each."""
    cases = [{**row, **case} for case in row.get("cases", [{}])]
    severities = dict.fromkeys(case.get("severity", "error") for case in cases)
    meanings = dict.fromkeys(f"{case['key']}: {case['reason']}" for case in cases)
    fixes = dict.fromkeys(case["fix"] for case in cases)
    explained = {
        "severity": " or ".join(severities),
        "meaning": _with_names("\n".join(meanings)),
        "fix": _with_names("\n".join(fixes)),
    }
    releases = []
    if "since" in row:
        releases.append(f"since {row['since']}")
    if "before" in row:
        releases.append(f"before {row['before']}")
    if releases:
        explained["releases"] = ", ".join(releases)
    return explained


def _with_names(sentence: str) -> str:
    """Replace what a check fills in, ``{stage}``, by its name: ``<stage>``; keys stay as they
    are.
    """

    def named(name: str) -> str:
        if "." in name:
            return name
        return f"<{name}>"

    return filled(sentence, named)
