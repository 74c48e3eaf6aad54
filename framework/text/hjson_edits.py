"""Changes to DeepSpeed JSON that keep the text: comments, order and layout of everything else stay as they are.

An edit names its place by the path in the original document, also when several are made at once. Each result is read
again and compared with the value that was meant, so that no layout, however odd, can lead to a file that says something
else.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from framework.errors import ConfigError
from framework.system.output import visible
from framework.text.document import KeyPath, at
from framework.text.hjson import HjsonDocument, parse_hjson
from framework.text.hjson_splices import TextEditor, spliced


@dataclass(frozen=True)
class RenameKey:
    """Another name for a key, at its place."""

    path: KeyPath
    name: str


@dataclass(frozen=True)
class MoveMember:
    """A member, with the comments in it, becomes the last one of another section: `to` is its new path.

    Sections on the way that are missing are made.
    """

    path: KeyPath
    to: KeyPath


@dataclass(frozen=True)
class RemoveMember:
    """A key goes, with its value and the comments in it; a section that is left empty stays."""

    path: KeyPath


@dataclass(frozen=True)
class ReplaceValue:
    """Another value for a key or for an element of a list."""

    path: KeyPath
    value: Any


@dataclass(frozen=True)
class InsertMember:
    """A new key, the last one of its section; sections on the way that are missing are made."""

    path: KeyPath
    value: Any


Edit = RenameKey | MoveMember | RemoveMember | ReplaceValue | InsertMember


def apply_edits(document: HjsonDocument, edits: Sequence[Edit]) -> str:
    """The text of a document with all edits made.

    The edits must fit the document and must not `clash`: anything else is an error of the caller, found by assertion.

    Raises:
        ConfigError: the text would grow beyond what `parse_hjson` reads.
    """
    for edit in edits:
        _check_fits(document, edit)
    for first, second in _neighbours(edits):
        assert not clash(first, second), f"{first} and {second} overlap"
    cutter = TextEditor(document)
    for edit in edits:
        _cut(cutter, edit)
    splices = cutter.splices()
    expected = edited_value(document.value, edits)
    text = spliced(document.text, splices)
    if not _reads_as(text, expected):  # the value of a ''' text depends on its column, which an edit may shift
        splices += cutter.requoted(splices)
        text = spliced(document.text, splices)
        parse_hjson(text, name=document.name)
        assert _reads_as(text, expected), f"{edits} went wrong"
    return text


def edited_value(value: Any, edits: Iterable[Edit]) -> Any:
    """Apply the edits to a plain value."""
    edits, value = tuple(edits), deepcopy(value)
    additions: list[tuple[KeyPath, Any]] = []
    for edit in edits:
        if isinstance(edit, MoveMember):
            additions.append((edit.to, at(value, edit.path[:-1]).pop(edit.path[-1])))
        elif isinstance(edit, RemoveMember):
            del at(value, edit.path[:-1])[edit.path[-1]]
        elif isinstance(edit, ReplaceValue):
            at(value, edit.path[:-1])[edit.path[-1]] = deepcopy(edit.value)
        elif isinstance(edit, InsertMember):
            additions.append((edit.path, deepcopy(edit.value)))
    for path, addition in additions:
        section = value
        for key in path[:-1]:
            section = section.setdefault(key, {}) if isinstance(section, dict) else section[key]
        section[path[-1]] = addition
    names: defaultdict[KeyPath, dict[str | int, str]] = defaultdict(dict)
    for edit in edits:
        if isinstance(edit, RenameKey):
            names[edit.path[:-1]][edit.path[-1]] = edit.name
    for path in sorted(names, key=len, reverse=True):  # the inner ones while their path still leads there
        section = at(value, path)
        items = [(names[path].get(key, key), item) for key, item in section.items()]
        section.clear()
        section.update(items)
    return value


def clash(first: Edit, second: Edit) -> bool:
    """Check whether two edits cannot be made at once: the one changes what the other is about."""
    if first.path == second.path and {type(first), type(second)} == {RenameKey, ReplaceValue}:
        return False
    if _touched(first) is not None and _touched(first) == _touched(second):
        return True
    made, other = _made(first), _made(second)
    if made is not None and other is not None and (_is_in(made, other) or _is_in(other, made)):
        return True
    return _disturbs(first, second) or _disturbs(second, first)


def unified_diff(before: str, after: str, name: str) -> str:
    """Format the changes as `diff -u` does; characters that would control the terminal are shown as escapes."""
    if before.endswith("\n") and after.endswith("\n"):  # what stands behind the last line end is no line
        before, after = before[:-1], after[:-1]
    old, new = ([_shown(line) for line in text.split("\n")] for text in (before, after))
    return "\n".join(difflib.unified_diff(old, new, name, name, lineterm=""))


def _shown(line: str) -> str:
    return visible(line.removesuffix("\r"), keeps="\t")


def _neighbours(edits: Sequence[Edit]) -> Iterator[tuple[Edit, Edit]]:
    """The pairs that may clash: a path of the one is in a path of the other (all pairs would be too many)."""
    paths = [{path for path in (_touched(edit), _made(edit)) if path is not None} for edit in edits]
    owners: defaultdict[KeyPath, list[int]] = defaultdict(list)
    for number, group in enumerate(paths):
        for path in group:
            owners[path].append(number)
    for number, group in enumerate(paths):
        outer = {path[:length] for path in group for length in range(1, len(path) + 1)}
        yield from (
            (edits[number], edits[other]) for path in outer & owners.keys() for other in owners[path] if other != number
        )


def _cut(cutter: TextEditor, edit: Edit) -> None:
    if isinstance(edit, RenameKey):
        cutter.rename(edit.path, edit.name)
    elif isinstance(edit, MoveMember):
        cutter.move(edit.path, edit.to)
    elif isinstance(edit, RemoveMember):
        cutter.remove(edit.path)
    elif isinstance(edit, ReplaceValue):
        cutter.replace(edit.path, edit.value)
    else:
        cutter.insert(edit.path, edit.value)


def _reads_as(text: str, expected: Any) -> bool:
    try:
        return bool(parse_hjson(text, name="").value == expected)
    except ConfigError:
        return False


def _check_fits(document: HjsonDocument, edit: Edit) -> None:
    touched, made = _touched(edit), _made(edit)
    if touched is not None:
        assert touched in document.spans.keys() - {()}, f"{edit}: there is no such key"
        is_element = document.spans[touched].key is None
        assert isinstance(edit, ReplaceValue) or not is_element, f"{edit}: an element of a list has no key"
    if made is not None:
        assert made not in document.spans, f"{edit}: the key is there already"
        assert touched is None or not _is_in(made, touched), f"{edit}: into itself"
        depth = max(depth for depth in range(len(made)) if made[:depth] in document.spans)
        assert isinstance(at(document.value, made[:depth]), dict), f"{edit}: {made[:depth]} is no section"
        assert all(isinstance(key, str) for key in made[depth:]), f"{edit}: not a key"


def _touched(edit: Edit) -> KeyPath | None:
    return None if isinstance(edit, InsertMember) else edit.path


def _made(edit: Edit) -> KeyPath | None:
    """The path that exists only after the edit."""
    if isinstance(edit, RenameKey):
        return (*edit.path[:-1], edit.name)
    if isinstance(edit, MoveMember):
        return edit.to
    return edit.path if isinstance(edit, InsertMember) else None


def _disturbs(first: Edit, second: Edit) -> bool:
    """Check whether the first takes away, or names otherwise, what the second is about."""
    if isinstance(first, InsertMember):
        return False
    touched, made = _touched(second), _made(second)
    if isinstance(first, RenameKey):
        if isinstance(second, RenameKey):
            return made == first.path
        return made is not None and _is_in(made, first.path)
    return any(path is not None and _is_in(path, first.path) for path in (touched, made))


def _is_in(path: KeyPath, outer: KeyPath) -> bool:
    return path[: len(outer)] == outer
