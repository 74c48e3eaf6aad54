"""`KeyChecker`: every key of a DeepSpeed JSON by itself, held against the key table of a release.

It judges whether the release reads the key, of what type and in which range; and which keys a
section does not work without. Keys together are judged by the rules (`deepspeed_lint.rules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from json import dumps
from typing import Any, Final

from deepspeed_lint.errors import MISSING, Problem, Severity
from deepspeed_lint.facts import Facts, dotted
from deepspeed_lint.key_files import TYPED_SECTIONS, known_releases, variant_of, without_variant
from deepspeed_lint.keys import Key, KeyTable, history
from deepspeed_lint.text.document import KeyPath
from deepspeed_lint.values import Fault, class_mismatch, value_faults

# Names that people give to comments; a key of DeepSpeed is none of them.
_COMMENT: Final = re.compile(
    r"//.*|#.*|[_$-]*comments?[_-]?\d*|[_$].*comment.*|_+(?:note|doc|description|readme|todo).*",
    re.IGNORECASE,
)
# Where editors find a JSON Schema; DeepSpeed drops it, and it is not written for DeepSpeed.
_SCHEMA: Final = ("$schema",)
_USELESS: Final = {
    "deprecated": "DeepSpeed keeps it for old files only",
    "inert": "DeepSpeed reads it and does nothing with it",
}


@dataclass(frozen=True)
class KeyChecker:
    """Holds every key by itself against the table; problems come with the path of their key."""

    table: KeyTable
    facts: Facts

    def problems(self) -> Iterator[tuple[KeyPath, Problem]]:
        yield from self._missing((), self.facts.values)
        for path, value in self._walk(self.facts.values, ()):
            for fault in self._judge(path, value):
                yield _problem(path, fault, value)
            if isinstance(value, Mapping):
                yield from self._missing(path, value)
                yield from self._both_names(path, value)

    def _missing(
        self, path: KeyPath, values: Mapping[str, Any]
    ) -> Iterator[tuple[KeyPath, Problem]]:
        """Yield a problem for each key that a section does not work without and does not have.

        Parameters of a type are looked for once the type is known.
        """
        section = self._key(path)
        inside = (*path, "*")
        if section is None or section.status == "refused" or self._is_untabled(inside):
            return
        variant = self._variant(inside)
        subject = variant if path[-1] == "params" and variant else path[-1]
        for name in self._required(dotted(path), variant):
            waits_for_type = name == "params" and "type" not in values
            if name not in values and not waits_for_type:
                fault = Fault("missing-key", f"{subject} does not work without it", "add it")
                yield _problem((*path, name), fault)

    def _required(self, section: str, variant: str | None) -> list[str]:
        """Return the keys that a section, and the table of its type, need."""
        names = list(self.table.required(section))
        for kind in self.table.variants(section):
            if variant and kind.lower() == variant.lower():
                names += self.table.required(f"{section}[{kind}]")
        return names

    def _both_names(
        self, path: KeyPath, values: Mapping[str, Any]
    ) -> Iterator[tuple[KeyPath, Problem]]:
        """Yield a problem for each key under two of its names. DeepSpeed's models refuse this, but
        drop "auto" before they look.
        """
        seen: dict[str, str] = {}
        for name, value in values.items():
            key = self._key((*path, name))
            if key is None or not key.aliases or value == "auto":
                continue
            other = seen.setdefault(key.path, name)
            if other != name:
                reason = f"it is another name of {other}, which is given as well"
                fault = Fault("both-names", reason, "remove one of them")
                yield _problem((*path, name), fault, value)

    def _walk(self, values: Mapping[str, Any], section: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        """Yield path and value of each key that is to be judged, a section before its members."""
        for name, value in values.items():
            path = (*section, name)
            if self._is_untabled(path) or path == _SCHEMA:
                continue
            yield path, value
            key = self._key(path)
            if key is not None and _has_known_members(key):
                yield from self._walk_inside(key, value, path)

    def _walk_inside(self, key: Key, value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        if isinstance(value, Mapping):
            # A section where none belongs is one problem, and its members are not judged.
            if not key.from_python and not {"object", "any"}.isdisjoint(key.types):
                yield from self._walk(value, path)
        elif isinstance(value, list) and self._key((*path, "0")) is not None:
            yield from self._walk_items(value, path)

    def _walk_items(self, items: list[Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        for index, item in enumerate(items):
            yield (*path, str(index)), item
            if isinstance(item, Mapping):
                yield from self._walk(item, (*path, str(index)))

    def _key(self, path: KeyPath) -> Key | None:
        if path:
            return self.table.get(list(map(str, path)), self._variant(path))
        return None

    def _variant(self, path: KeyPath) -> str | None:
        return variant_of(self.facts.values, path)

    def _is_untabled(self, path: KeyPath) -> bool:
        """Check whether the path is a parameter of one of torch's own optimizers or schedules."""
        if len(path) < 3 or path[0] not in TYPED_SECTIONS or path[1] != "params":
            return False
        variant = self._variant(path)
        known = {name.lower() for name in self.table.variants(f"{path[0]}.params")}
        return variant is None or variant.lower() not in known

    def _judge(self, path: KeyPath, value: Any) -> Iterator[Fault]:
        """Yield what is wrong with one key, or with its value."""
        key = self._key(path)
        if key is None:
            yield self._unknown(path, value)
        elif key.status == "refused":
            yield self._removed(key)
        elif value != "auto":  # the rule `auto_value` is about these
            if key.status in _USELESS:
                fix = _instead(key.replaced_by, key.instead)
                yield Fault(f"{key.status}-key", _USELESS[key.status], fix, "warning")
            yield from value_faults(key, value)
            mismatch = class_mismatch(self.facts, key)
            if mismatch is not None:
                yield mismatch

    def _removed(self, key: Key) -> Fault:
        past = history(key.path)
        if past.removed:
            when = f" since {past.removed}"
        else:
            when = ""
        reason = f"DeepSpeed {self.table.release} raises an error where it is present{when}"
        return Fault("removed-key", reason, _instead(key.replaced_by, key.instead))

    def _unknown(self, path: KeyPath, value: Any) -> Fault:
        """Return what is wrong with a key that the table does not have."""
        section = self._key(path[:-1])
        name = str(path[-1])
        is_refused = section is not None and section.unknown == "error"
        if is_refused:
            reason = f"DeepSpeed {self.table.release} refuses"
            refused = f"{reason} it"
        else:
            reason = f"DeepSpeed {self.table.release} reads no such key and drops it in silence"
            refused = reason
        if _COMMENT.fullmatch(name):
            severity: Severity = "error" if is_refused else "warning"
            return Fault("comment-key", refused, "write comments as // comments", severity)
        if "." in name or "[" in name:
            return Fault("dotted-key", refused, self._as_sections(dotted(path), value))
        of_another_release = _of_another_release(dotted(path), reason)
        if of_another_release is not None:
            return of_another_release
        return Fault("unknown-key", refused, self._fix_of_unknown(path, value))

    def _fix_of_unknown(self, path: KeyPath, value: Any) -> str:
        guesses = self.table.nearest(list(map(str, path)), self._variant(path))
        if guesses:
            return f"did you mean {' or '.join(guesses)}?"
        if isinstance(value, Mapping) and value and self._are_top_level(value):
            return f"write {', '.join(map(str, value))} without this section around it"
        return "remove it"

    def _are_top_level(self, names: Iterable[object]) -> bool:
        return all(self.table.get(str(name)) for name in names)

    def _as_sections(self, name: str, value: Any) -> str:
        """Return the fix for a dotted path where a name belongs."""
        if isinstance(value, (str, int, float, type(None))):
            nested = dumps(value)
        else:
            nested = "..."
        for part in reversed(without_variant(name).split(".")):
            nested = f'{{"{part}": {nested}}}'
        if self.table.get(name) is not None:
            return f"write it as sections: {nested}"
        return "remove it"


def _has_known_members(key: Key) -> bool:
    return key.status != "refused" and key.unknown != "free"


def _of_another_release(path: str, reason: str) -> Fault | None:
    """Return what is wrong with a key that only other releases read, or None."""
    past = history(path)
    kind = "key-of-another-release"
    if past.removed is not None:
        fix = _instead(past.replaced_by, past.instead)
        return Fault(kind, f"{reason}: it went {_when(past.removed)}", fix)
    if past.added is not None:
        fix = f"use DeepSpeed {past.added} or newer, or remove it"
        return Fault(kind, f"{reason}: it came {_when(past.added)}", fix)
    return None


def _problem(path: KeyPath, fault: Fault, value: Any = MISSING) -> tuple[KeyPath, Problem]:
    kind, reason, fix, severity = fault
    return path, Problem(kind, reason, fix, dotted(path), value, severity=severity)


def _when(release: str) -> str:
    """Return when a key came or went; between two releases with tables, the exact one is not
    known.
    """
    known = known_releases()
    before = known[max(0, known.index(release) - 1)]
    is_next = release.rpartition(".")[0] == before.rpartition(".")[0]
    if is_next:
        return f"with {release}"
    return f"after {before}, in {release} at the latest"


def _instead(replaced_by: tuple[str, ...], instead: str) -> str:
    if instead:
        return instead
    if replaced_by:
        return f"use {' or '.join(replaced_by)}"
    return "remove it"
