"""Every key that DeepSpeed reads, per release: type, range, default, one sentence, and what to
write instead.

`tables/<release>.json` holds the keys of one release, written by `tools/build_key_table.py`. The
newest file is whole; every older one holds what differs from the next newer one, so that the files
together are the history of the keys. `tables/sentences.json` is written by hand: what no program
can read out of DeepSpeed.

Paths are dotted, as in ``zero_optimization.offload_param.device``. ``*`` stands for a name of the
user's choice or for the place in a list. A section with keys that depend on a type has one table
per type: ``optimizer.params[AdamW].lr``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, Literal

from deepspeed_lint.errors import MISSING, UsageError, show_value
from deepspeed_lint.key_files import (
    TABLES,
    Entry,
    by_number,
    history,
    is_of_another_type,
    known_releases,
    load_entries,
    sentence_entry,
    without_variant,
)
from deepspeed_lint.text.typos import ALIKE, likeness, means

__all__ = ["Key", "KeyTable", "history", "known_releases", "load_table"]

Status = Literal["read", "inert", "deprecated", "refused"]

_VERY_ALIKE: Final = 0.8
# A name that stands in more sections than this ("enabled") gives no hint of the section that was
# meant.
_COMMON: Final = 3
# Each monitor has keys of its own service: another monitor is no place for them.
_MONITORS: Final = ("tensorboard", "wandb", "csv_monitor", "comet")
_MOST_GUESSES: Final = 3
_RELEASE: Final = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")
# Names from other tools, each with the names that DeepSpeed gives the same thing; the section
# decides between them. The second table has names that mean it only in a section with such a key.
_OTHER_WORDS, _WORDS_INSIDE = json.loads(
    (TABLES / "other_words.json").read_text(encoding="utf-8")
).values()
# A key that does less is a worse guess.
_HANDICAP: Final[Mapping[str, float]] = {"read": 0.0, "inert": 0.3, "deprecated": 0.3}


@dataclass(frozen=True)
class Key:
    """One key of one release.

    Attributes:
        path: dotted path; ``optimizer.params[AdamW].lr`` where it depends on a type.
        sentence: what it means, in one sentence.
        types: JSON types that it takes, without null: boolean, integer, number, string, array,
            object, any.
        nullable: null is taken too.
        default: what leaving it out means; `MISSING` when DeepSpeed has none.
        required: the section does not work without it.
        enum: the only values; empty when any value of the type will do.
        any_case: a text may be written in upper or lower case.
        examples: known values where others pass too.
        minimum, maximum, exclusive_minimum, exclusive_maximum, multiple_of: limits of a number,
            None for none.
        items: type of an array's items.
        unknown: for a section: unknown keys in it are an error, ignored, or its point (free).
        aliases: other names that mean the same; both at once are an error.
        status: inert keys do nothing, deprecated ones have a better place, refused ones are an
            error.
        replaced_by: paths to use instead of a deprecated or refused key.
        instead: what to do instead, where no key takes the place.
        taken_by: the classes that take a parameter, where not all classes behind the type do.
        from_python: the value is a Python object that no JSON value can be.
        reader: how DeepSpeed reads it: a pydantic section drops "auto" and refuses unknown keys,
            the others do not.
        source: file and name in DeepSpeed.
    """

    path: str
    sentence: str
    types: tuple[str, ...] = ("any",)
    nullable: bool = False
    default: Any = MISSING
    required: bool = False
    enum: tuple[Any, ...] = ()
    any_case: bool = False
    examples: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    multiple_of: float | None = None
    items: str | None = None
    unknown: Literal["error", "ignored", "free"] | None = None
    aliases: tuple[str, ...] = ()
    status: Status = "read"
    replaced_by: tuple[str, ...] = ()
    instead: str = ""
    taken_by: tuple[str, ...] = ()
    from_python: bool = False
    reader: Literal["pydantic", "recorded", "source", "signature"] = "recorded"
    source: str = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return _name_of(self.path)

    @property
    def knows_auto(self) -> bool:
        """Check whether "auto" is a value of DeepSpeed's own."""
        return self.default == "auto" or "auto" in self.enum + self.examples


class KeyTable:
    """The keys of one release. Iterating gives their paths, in order."""

    def __init__(self, release: str, entries: Mapping[str, Entry]) -> None:
        self.release = release
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def get(self, path: str | Sequence[str], variant: str | None = None) -> Key | None:
        """Return the key at a path, or under an alias; None if this release does not know it.

        Args:
            path: dotted, or its parts where a name of the user's choice may hold a dot.
            variant: the type that the section names, for ``optimizer.params.lr``: without it the
                first type that fits.
        """
        table_path = self._find(path, variant)
        if table_path is None:
            return None
        return self._key(table_path)

    def exact(self, path: str) -> Key | None:
        """Return the key of this path in the table, type and ``*`` included, or None."""
        if path in self.entries:
            return self._key(path)
        return None

    def children(self, path: str = "") -> tuple[str, ...]:
        """Return the paths of the keys directly in a section, ``*`` among them.

        Without a path they are the keys of the top level.
        """
        return tuple(self._children.get(path, {}).values())

    def required(self, path: str) -> tuple[str, ...]:
        """Return the names of the keys that a section does not work without."""
        children = self._children.get(path, {})
        return tuple(
            name for name, child in children.items() if self.entries[child].get("required")
        )

    def variants(self, path: str) -> tuple[str, ...]:
        """Types that a section has tables for: Adam, AdamW, ... of ``optimizer.params``."""
        return tuple(table[len(path) + 1 : -1] for table in self._variants.get(path, ()))

    def nearest(self, path: str | Sequence[str], variant: str | None = None) -> list[str]:
        """Return the paths that a misspelt or misplaced key most likely means.

        At most three, best first.
        """
        parts = _parts(path)
        table_path = self._find(parts, variant)
        if table_path is None:
            return _distinct(self._likely(parts, variant))
        if self._status(table_path) == "refused":
            return list(self.entries[table_path].get("replaced_by", ()))
        return [without_variant(table_path)]

    def _likely(self, parts: Sequence[str], variant: str | None) -> list[str]:
        """Return the keys that an unknown path may mean, best first."""
        section = self._nearest_section(parts[:-1], variant)
        other_words = list(_OTHER_WORDS.get(parts[-1], ()))
        if section is not None:
            meant = self._meant_in(section, other_words + _WORDS_INSIDE.get(parts[-1], []))
            if meant:
                return meant
        guesses: list[tuple[float, str]] = []
        for name in [*reversed(other_words), parts[-1]]:
            guesses += self._guesses(section, name)
        guesses.sort(key=lambda guess: (-guess[0], len(guess[1]), guess[1]))
        return [table_path for _, table_path in guesses]

    def _find(self, path: str | Sequence[str], variant: str | None) -> str | None:
        """Return the path of a key as this table writes it, following aliases and ``*``."""
        parts = _parts(path)
        places = [""]  # paths of the parts so far; several if a section has a table per type
        for depth, part in enumerate(parts):
            places = self._step_down(places, part)
            if not places:
                # ``optimizer.params[AdamW].lr``; parts are names of a file, where a dot is only a
                # dot
                if isinstance(path, str) and path in self.entries:
                    return path
                return None
            if depth < len(parts) - 1:
                places = self._all_tables(places, variant)
        return places[0] if places else None

    def _step_down(self, places: list[str], name: str) -> list[str]:
        children = []
        for place in places:
            child = self._child(place, name)
            if child is not None:
                children.append(child)
        return children

    def _child(self, place: str, name: str) -> str | None:
        names = self._children.get(place, {})
        return names.get(name) or self._aliases.get(place, {}).get(name) or names.get("*")

    def _all_tables(self, places: list[str], variant: str | None) -> list[str]:
        tables = []
        for place in places:
            tables += self._tables_of(place, variant)
        return tables

    def _tables_of(self, place: str, variant: str | None) -> list[str]:
        """Return the tables that hold the keys of a section."""
        entry = self.entries.get(place, {})
        if entry.get("status") == "deprecated" and place not in self._children:
            return list(entry.get("replaced_by", ()))  # `bfloat16` has the keys of `bf16`
        tables = self._variants.get(place, [])
        if variant is not None:
            wanted = f"{place}[{variant}]".lower()
            tables = [table for table in tables if table.lower() == wanted]
        return [*tables, place]

    def _key(self, path: str) -> Key:
        fields = {name: _as_field(name, value) for name, value in self.entries[path].items()}
        types = fields.pop("type", "any")
        if isinstance(types, str):
            types = (types,)
        words = sentence_entry(path) or {}
        return Key(path=path, sentence=words.get("sentence", ""), types=types, **fields)

    @cached_property
    def _children(self) -> dict[str, dict[str, str]]:
        """Section -> name -> path."""
        tree: dict[str, dict[str, str]] = {}
        for path in self.entries:
            section, _, name = path.rpartition(".")
            if not name.endswith("]"):
                tree.setdefault(section, {})[name] = path
        return tree

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """Last part of the path -> paths."""
        names: dict[str, list[str]] = {}
        for path in self.entries:
            names.setdefault(_name_of(path), []).append(path)
        return names

    @cached_property
    def _variants(self) -> dict[str, list[str]]:
        """Section -> its tables, one per type."""
        tables: dict[str, list[str]] = {}
        for path, entry in self.entries.items():
            if path.endswith("]") and entry.get("status") != "refused":
                tables.setdefault(path[: path.rindex("[")], []).append(path)
        return tables

    @cached_property
    def _aliases(self) -> dict[str, dict[str, str]]:
        """Section -> alias -> path."""
        tree: dict[str, dict[str, str]] = {}
        for path, entry in self.entries.items():
            for alias in entry.get("aliases", ()):
                tree.setdefault(path.rpartition(".")[0], {}).setdefault(alias, path)
        return tree

    # ---- guesses

    def _nearest_section(self, parts: Sequence[str], variant: str | None) -> str | None:
        """Return the section that a path goes through, misspelt or not; None if no section is like
        it.
        """
        section = ""
        for part in parts:
            child = self._child(section, part) or self._likest_child(section, part)
            if child is None:
                return None
            section = child
            if variant:
                section = self._tables_of(child, variant)[0]
        return section

    def _likest_child(self, section: str, name: str) -> str | None:
        """Return the key of a section that is most like a name, or None if none is."""
        known = self._children.get(section, {})
        likest = max(known, key=lambda other: likeness(name, other), default=None)
        if likest is None or likeness(name, likest) < ALIKE:
            return None
        return known[likest]

    def _meant_in(self, section: str, names: Iterable[str]) -> list[str]:
        """Return the keys of just these names in a section, in the tables of all its types where
        none is named.
        """
        meant = []
        for name in names:
            for table in self._with_variants(section):
                path = self._children.get(table, {}).get(name)
                if path is not None and self._status(path) == "read":
                    meant.append(path)
        return meant

    def _with_variants(self, section: str | None) -> list[str]:
        """Return a section with the tables of its types."""
        if section is None:
            return []
        return [section, *self._variants.get(section, ())]

    def _status(self, path: str) -> str:
        status: str = self.entries[path].get("status", "read")
        return status

    def _guesses(self, section: str | None, name: str) -> list[tuple[float, str]]:
        """Return likeness and path of keys of about this name in the section, of just this name
        elsewhere, or else of about it elsewhere.
        """
        tables = self._with_variants(section)
        peers = _MONITORS if section in _MONITORS else ()
        close = self._alike(tables, name, ALIKE)
        homes = self._homes(name, section, peers)
        # Alike in the section, 0.74 + 0.2 at least, goes before just this name elsewhere.
        guesses = [(near + 0.2, path) for near, path in close]
        guesses += self._ranked([(0.9, path) for path in _likely_homes(homes, section)])
        if not close and not homes:
            guesses += self._misspelt_elsewhere(name, section, tables + list(peers))
        return guesses

    def _homes(self, name: str, section: str | None, peers: tuple[str, ...]) -> list[str]:
        """Return the keys of just this name in any section that may be meant."""
        homes = []
        for path in self._by_name.get(name, ()):
            is_elsewhere = is_of_another_type(path, section) or path.startswith(peers)
            if "*" not in path and not is_elsewhere:
                homes.append(path)
        return homes

    def _misspelt_elsewhere(
        self, name: str, section: str | None, excluded: Sequence[str]
    ) -> list[tuple[float, str]]:
        """Return keys of other sections that the name can only be a slip for."""
        sections = []
        for other in self._children:
            if other not in excluded and not is_of_another_type(f"{other}.", section):
                sections.append(other)
        guesses = []
        for near, path in self._alike(sections, name, _VERY_ALIKE):
            if is_slip(name, _name_of(path)):
                guesses.append((near - 0.1, path))
        return guesses

    def _alike(self, sections: Sequence[str], name: str, least: float) -> list[tuple[float, str]]:
        """Return likeness and path of the keys of sections with at least this likeness."""
        guesses = []
        for section in sections:
            for other, path in self._names_in(section).items():
                near = likeness(name, other)
                if near >= least:
                    guesses.append((near, path))
        return self._ranked(guesses)

    def _names_in(self, section: str) -> dict[str, str]:
        """Return names and aliases of the keys of a section, with their paths."""
        names = self._aliases.get(section, {}) | self._children.get(section, {})
        names.pop("*", None)
        return names

    def _ranked(self, guesses: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
        """Lower the likeness of inert and deprecated keys, and drop refused ones."""
        ranked = []
        for near, path in guesses:
            status = self._status(path)
            if status != "refused":
                ranked.append((near - _HANDICAP[status], path))
        return ranked


def load_table(release: str | None = None) -> KeyTable:
    """Load the table of a release: ``0.18.9``, ``0.19`` for its newest known patch, None for the
    newest of all.

    Of 0.16 to 0.18 only the newest patch has one, which stands for the older ones too.

    Raises:
        UsageError: there is no table of that release.
    """
    known = known_releases()
    if release is None:
        return _load(known[-1])
    wanted = release.strip().removeprefix("v").partition("+")[0]
    fitting = _fitting(known, wanted)
    if not fitting:
        raise UsageError(
            f"no table of DeepSpeed {show_value(release)}: known are {', '.join(known)}"
        )
    return _load(fitting[-1])


def _fitting(known: Sequence[str], release: str) -> list[str]:
    """Return the releases with a table that a release may mean, oldest first."""
    if not release:
        return []
    fitting = [name for name in known if name == release or name.startswith(f"{release}.")]
    return fitting or _next_patch(release)


def _next_patch(release: str) -> list[str]:
    """Return the nearest newer release of the same minor one that has a table; at most one."""
    if not _RELEASE.fullmatch(release):
        return []
    minor = release.rpartition(".")[0]
    for name in known_releases():
        if name.rpartition(".")[0] == minor and by_number(name) > by_number(release):
            return [name]
    return []


def is_slip(written: str, known: str) -> bool:
    """Check whether the written name can only be a slip for the known one, or is a word of another
    tool for it.
    """
    if known in _OTHER_WORDS.get(written, ()) or known in _WORDS_INSIDE.get(written, ()):
        return True
    return means(written, known)


@cache
def _load(release: str) -> KeyTable:
    return KeyTable(release, load_entries(release))


def _as_field(name: str, value: Any) -> Any:
    """Return a value of a table as `Key` has it: lists are tuples, but for a default."""
    if isinstance(value, list) and name != "default":
        return tuple(value)
    return value


def _likely_homes(homes: Sequence[str], section: str | None) -> Sequence[str]:
    """Return the keys within the section, or all; none where many sections have such a key."""
    inside = [path for path in homes if section and path.startswith(f"{section}.")]
    if inside:
        return inside
    if len({without_variant(path) for path in homes}) > _COMMON:
        return []
    return homes


def _name_of(path: str) -> str:
    return path.rpartition(".")[2]


def _parts(path: str | Sequence[str]) -> list[str]:
    if isinstance(path, str):
        return path.split(".")
    return list(path)


def _distinct(paths: Iterable[str]) -> list[str]:
    """Return the first guesses, as a config writes them."""
    return list(dict.fromkeys(without_variant(path) for path in paths))[:_MOST_GUESSES]
