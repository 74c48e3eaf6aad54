"""The files behind the key tables: `tables/<release>.json`, written by a program, and
`tables/sentences.json`, by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.errors import MISSING

Entry = Mapping[str, Any]

TABLES: Final = Path(__file__).parent / "tables"
# Sections with keys that depend on the type that they name.
TYPED_SECTIONS: Final = ("optimizer", "scheduler")
# Names that rules ask for, each list by the name that it has there.
NAMES: Final[Mapping[str, Any]] = json.loads((TABLES / "names.json").read_text(encoding="utf-8"))
_RELEASE: Final = re.compile(r"\d+\.\d+\.\d+")
_VARIANT: Final = re.compile(r"\[\w+\]")


@cache
def known_releases() -> tuple[str, ...]:
    """Releases that have a table, oldest first."""
    names = [file.stem for file in TABLES.glob("*.json") if _RELEASE.fullmatch(file.stem)]
    return tuple(sorted(names, key=by_number))


def by_number(release: str) -> tuple[int, ...]:
    """Sort key: 0.19.10 comes after 0.19.9."""
    return tuple(map(int, release.split(".")))


@cache
def load_entries(release: str) -> dict[str, Entry]:
    """Read every key of a release: the newest table, with the differences down to this release."""
    entries: dict[str, Entry] = {}
    for name in reversed(known_releases()):
        document = _document(name)
        entries.update(document["keys"])
        for path in document["absent"]:
            entries.pop(path, None)
        if name == release:
            break
    return {path: entries[path] for path in sorted(entries)}


def states_of(path: str) -> Iterator[tuple[str, Entry | None]]:
    """Yield release and entry of one key, newest release first.

    The entry is None where the release does not know the key.
    """
    entry: Entry | None = None
    for release in reversed(known_releases()):
        document = _document(release)
        if path in document["keys"]:
            entry = document["keys"][path]
        elif path in document["absent"]:
            entry = None
        yield release, entry


def sentence_entry(path: str) -> Entry | None:
    """Return what is written by hand about a key: its sentence, and fields that no program reads
    out of DeepSpeed.
    """
    words = _sentences().get(path)
    if words is None:
        words = _sentences().get(_VARIANT.sub("[*]", path))
    if words is None:
        words = _words_of_pattern(path)
    if isinstance(words, str):
        return {"sentence": words}
    return words


def _words_of_pattern(path: str) -> str | Entry | None:
    for pattern, text in _patterns():
        if pattern.fullmatch(path):
            return _sentences()[text]
    return None


def variant_of(values: Mapping[str, Any], path: Sequence[str | int]) -> str | None:
    """Return the type that the section around a path names, if its keys depend on one, or None."""
    if len(path) < 2 or path[0] not in TYPED_SECTIONS:
        return None
    section = values.get(str(path[0]))
    if not isinstance(section, Mapping):
        return None
    kind = section.get("type")
    if isinstance(kind, str):
        return kind
    return None


def without_variant(path: str) -> str:
    """Return ``optimizer.params[AdamW].lr`` as a config writes it: ``optimizer.params.lr``."""
    return _VARIANT.sub("", path)


def is_of_another_type(path: str, section: str | None) -> bool:
    """Check whether a key is in the table of another type than a section:
    ``optimizer.params[Lamb].lr`` for ``optimizer.params[AdamW]``.
    """
    home = path.rpartition(".")[0]
    if section is None or not section.endswith("]") or home == section:
        return False
    return without_variant(home) == without_variant(section)


@cache
def _document(release: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((TABLES / f"{release}.json").read_text(encoding="utf-8"))
    return document


@cache
def _sentences() -> dict[str, str | Entry]:
    """Return path -> its sentence, or an entry with the sentence and further fields."""
    sentences: dict[str, str | Entry] = json.loads(
        (TABLES / "sentences.json").read_text(encoding="utf-8")
    )
    return sentences


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the paths with ``*`` in them, which stand for every path that fits and has no sentence
    of its own.
    """
    return tuple((_pattern(path), path) for path in _sentences() if "*" in path)


def _pattern(path: str) -> re.Pattern[str]:
    any_variant = re.escape(path).replace(r"\[\*\]", r"\[\w+\]")
    return re.compile(any_variant.replace(r"\*", r"[^.]+"))


@dataclass(frozen=True)
class History:
    """When a key came and went, over the known releases; of 0.16 to 0.18 only the newest patch is
    known.

    Attributes:
        added: first known release that reads it; None when the oldest known one does, or none.
        removed: first known release that no longer reads it; None when the newest one does, or none
            ever did.
        replaced_by: paths to use instead.
        instead: what to do instead, where no key takes the place.
    """

    added: str | None = None
    removed: str | None = None
    replaced_by: tuple[str, ...] = ()
    instead: str = ""


def history(path: str) -> History:
    """Return the history of a key, spelled as in the tables: ``optimizer.params[OneBitAdam]``."""
    states = list(states_of(path))[::-1]
    added, removed = _limits([release for release, entry in states if _is_read(entry)])
    words = sentence_entry(path) or {}
    newest = states[-1][1] or {}
    return History(
        added=added,
        removed=removed,
        replaced_by=tuple(words.get("replaced_by", newest.get("replaced_by", ()))),
        instead=words.get("instead", ""),
    )


def _limits(reading: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the releases in which a key came and went, from those that read it, oldest first; None
    where it was always there, or still is.
    """
    if not reading:
        return None, None
    known = known_releases()
    added = None
    removed = None
    if reading[0] != known[0]:
        added = reading[0]
    if reading[-1] != known[-1]:
        removed = known[known.index(reading[-1]) + 1]
    return added, removed


def was_off(path: str, value: Any) -> bool:
    """Check whether a key of another release asks for nothing: false, null, empty, not enabled, or
    at the default that it had last.
    """
    if isinstance(value, Mapping) and not value.get("enabled", _last_default(f"{path}.enabled")):
        return True
    default = _last_default(path)
    return not value or (type(value) is type(default) and bool(value == default))


def _last_default(path: str) -> Any:
    for _, entry in states_of(path):
        if entry is not None and _is_read(entry):
            return entry.get("default", MISSING)
    return MISSING


def _is_read(entry: Entry | None) -> bool:
    return entry is not None and entry.get("status") != "refused"
