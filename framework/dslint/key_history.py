"""When a DeepSpeed key came, changed and went, over the releases that have a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from framework.dslint.key_files import Entry, sentence_entry, states_of
from framework.errors import MISSING

_NOT_ABOUT_THE_VALUE: Final = frozenset({"source", "reader", "replaced_by", "instead"})


@dataclass(frozen=True)
class Change:
    """One field of a key that differs between two known releases."""

    release: str
    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class History:
    """What happened to a key over the known releases; of 0.16 to 0.18 only the newest patch is known.

    Attributes:
        path: the key.
        added: first known release that reads it; None when the oldest known one does, or none.
        removed: first known release that no longer reads it; None when the newest one does, or none ever did.
        refused: the newest release raises an error where the key is present, instead of ignoring it.
        replaced_by: paths to use instead.
        instead: what to do instead, where no key takes the place.
        changes: other defaults, types and limits, oldest first.
    """

    path: str
    added: str | None = None
    removed: str | None = None
    refused: bool = False
    replaced_by: tuple[str, ...] = ()
    instead: str = ""
    changes: tuple[Change, ...] = ()


def history(path: str) -> History:
    """The history of a key, written as the tables write it: ``optimizer.params[OneBitAdam]``."""
    states = list(states_of(path))[::-1]
    reading = [(release, entry) for release, entry in states if entry is not None and entry.get("status") != "refused"]
    words = sentence_entry(path) or {}
    newest = states[-1][1]
    known = [release for release, _ in states]
    after_last = known.index(reading[-1][0]) + 1 if reading else len(known)
    return History(
        path=path,
        added=reading[0][0] if reading and reading[0][0] != known[0] else None,
        removed=known[after_last] if after_last < len(known) else None,
        refused=newest is not None and newest.get("status") == "refused",
        replaced_by=tuple(words.get("replaced_by", (newest or {}).get("replaced_by", ()))),
        instead=words.get("instead", ""),
        changes=tuple(_changes(reading)),
    )


def was_off(path: str, value: Any) -> bool:
    """Whether a key of another release says nothing: false, null, empty, not enabled, or at the default that it had
    last.
    """
    if isinstance(value, Mapping) and not value.get("enabled", _last_default(f"{path}.enabled")):
        return True
    default = _last_default(path)
    return not value or (type(value) is type(default) and bool(value == default))


def _last_default(path: str) -> Any:
    last = next((entry for _, entry in states_of(path) if entry is not None and entry.get("status") != "refused"), {})
    return last.get("default", MISSING)


def _changes(states: Iterable[tuple[str, Entry]]) -> Iterator[Change]:
    before: Entry | None = None
    for release, entry in states:
        if before is not None:
            for field in sorted({*before, *entry} - _NOT_ABOUT_THE_VALUE):
                old, new = before.get(field, MISSING), entry.get(field, MISSING)
                if old != new:
                    yield Change(release, field, old, new)
        before = entry
