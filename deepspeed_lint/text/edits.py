"""Edits of a document's values, and of the text of JSON, where order and layout of everything else
stay as they are.

An edit names its place by the path in the original document, also when several are made at once.
Each result is read again and compared with the value that was meant, so that no layout, however
odd, can lead to a file with another meaning.
"""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from deepspeed_lint.errors import visible
from deepspeed_lint.text.document import BYTE_ORDER_MARK, Document, KeyPath, at, parse_document
from deepspeed_lint.text.hjson import parse_hjson
from deepspeed_lint.text.json_editor import EditError, JsonEditor, spliced


@dataclass(frozen=True)
class Edit:
    """A change at a path."""

    path: KeyPath

    @property
    def touched(self) -> KeyPath | None:
        """The path that has to be there."""
        return self.path

    @property
    def made(self) -> KeyPath | None:
        """The path that exists only after the edit."""
        return None


@dataclass(frozen=True)
class RenameKey(Edit):
    """Another name for a key, at its place."""

    name: str

    @property
    def made(self) -> KeyPath:
        return (*self.path[:-1], self.name)


@dataclass(frozen=True)
class MoveMember(Edit):
    """A member, with the comments in it, becomes the last one of another section: `to` is its new
    path.

    Sections on the way that are missing are made.
    """

    to: KeyPath

    @property
    def made(self) -> KeyPath:
        return self.to


@dataclass(frozen=True)
class RemoveMember(Edit):
    """A key goes, with its value and the comments in it; a section that is left empty stays."""


@dataclass(frozen=True)
class ReplaceValue(Edit):
    """Another value for a key or for an element of a list."""

    value: Any


@dataclass(frozen=True)
class InsertMember(Edit):
    """A new key, the last one of its section; sections on the way that are missing are made."""

    value: Any

    @property
    def touched(self) -> None:
        return None

    @property
    def made(self) -> KeyPath:
        return self.path


def apply_edits(document: Document, edits: Sequence[Edit]) -> str:
    """Return the text of a JSON document with all edits made; none may `clash` with another.

    Raises:
        EditError: they do not fit the document, or it is no JSON.
        ConfigError: the text would grow beyond what can be read.
    """
    check_fit(document, edits)
    if not is_json(document.text):
        raise EditError("no JSON")
    editor = JsonEditor(document)
    for edit in edits:
        _collect(editor, edit)
    text = spliced(document.text, editor.splices())
    if not _reads_as(document, text, edited_value(document.value, edits)):
        raise EditError(f"{edits} went wrong")
    return text


def _collect(editor: JsonEditor, edit: Edit) -> None:
    match edit:
        case RenameKey(path, name):
            editor.rename(path, name)
        case MoveMember(path, to):
            editor.move(path, to)
        case RemoveMember(path):
            editor.remove(path)
        case ReplaceValue(path, value):
            editor.replace(path, value)
        case InsertMember(path, value):
            editor.insert(path, value)


def is_json(text: str) -> bool:
    """Check whether a text is JSON, without comments and the like of Hjson."""
    try:
        json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError):
        return False
    return True


def edited_value(value: Any, edits: Iterable[Edit]) -> Any:
    """Apply the edits to a plain value."""
    value = deepcopy(value)
    additions: list[tuple[KeyPath, Any]] = []
    names: defaultdict[KeyPath, dict[str | int, str]] = defaultdict(dict)
    for edit in edits:
        match edit:
            case RenameKey((*home, key), name):
                names[tuple(home)][key] = name
            case MoveMember((*home, key), to):
                additions.append((to, at(value, home).pop(key)))
            case RemoveMember((*home, key)):
                del at(value, home)[key]
            case ReplaceValue((*home, key), new):
                at(value, home)[key] = deepcopy(new)
            case InsertMember(path, new):
                additions.append((path, deepcopy(new)))
    for path, addition in additions:
        _add(value, path, addition)
    # the inner ones while their path still leads there
    for path in sorted(names, key=len, reverse=True):
        _rename_keys(at(value, path), names[path])
    return value


def _add(value: Any, path: KeyPath, addition: Any) -> None:
    """Put a value at a path; sections on the way that are missing are made."""
    section = value
    for key in path[:-1]:
        if isinstance(section, dict):
            section = section.setdefault(key, {})
        else:
            section = section[key]
    section[path[-1]] = addition


def _rename_keys(section: dict[str | int, Any], names: dict[str | int, str]) -> None:
    """Rename keys of a section in place; their order stays."""
    items = [(names.get(key, key), item) for key, item in section.items()]
    section.clear()
    section.update(items)


def clash(first: Edit, second: Edit) -> bool:
    """Check whether two edits cannot be made at once: the one changes what the other is about."""
    if first.path == second.path and {type(first), type(second)} == {RenameKey, ReplaceValue}:
        return False
    if first.touched is not None and first.touched == second.touched:
        return True
    if first.made and second.made and _overlap(first.made, second.made):
        return True
    return _disturbs(first, second) or _disturbs(second, first)


def unified_diff(before: str, after: str, name: str) -> str:
    """Return a unified diff. Characters that would control the terminal are shown as escapes; line
    ends are not compared.
    """
    name = visible(name, keeps="")
    # a line end at the end of the text begins no other line
    if before.endswith("\n") and after.endswith("\n"):
        before = before[:-1]
        after = after[:-1]
    old_lines = _visible_lines(before)
    new_lines = _visible_lines(after)
    return "\n".join(difflib.unified_diff(old_lines, new_lines, name, name, lineterm=""))


def _visible_lines(text: str) -> list[str]:
    return [visible(line.removesuffix("\r"), keeps="\t") for line in text.split("\n")]


def _reads_as(document: Document, text: str, expected: Any) -> bool:
    """Check whether an edited text has the expected value."""
    if document.syntax == "hjson":
        value = parse_hjson(text, name=document.name).value
    else:
        value = parse_document(text, name=document.name, is_json=True).value
    return bool(value == expected or repr(value) == repr(expected))  # NaN is not equal to itself


def check_fit(document: Document, edits: Iterable[Edit]) -> None:
    """Raise EditError for an edit of a key that is not there, or that makes one that is."""
    for edit in edits:
        if not _is_makeable(document, edit) or not _is_touchable(document, edit):
            raise EditError(f"{edit} does not fit")


def _is_touchable(document: Document, edit: Edit) -> bool:
    """Check whether what an edit changes is there; only a value may be an element of a list."""
    touched = edit.touched
    if touched is None:
        return True
    if touched == () or touched not in document.spans:
        return False
    return isinstance(edit, ReplaceValue) or document.spans[touched].key is not None


def _is_makeable(document: Document, edit: Edit) -> bool:
    """Check whether what an edit makes has a section to go to, and is not there yet."""
    made = edit.made
    if made is None:
        return True
    home = _nearest_section(document, made)
    if home is None:  # a file of comments alone has no place for a key
        return False
    if made in document.spans or _is_within(made, edit.touched):
        return False
    return isinstance(at(document.value, home), dict)


def _nearest_section(document: Document, path: KeyPath) -> KeyPath | None:
    """Return the innermost section around a path that is there."""
    for depth in range(len(path) - 1, -1, -1):
        if path[:depth] in document.spans:
            return path[:depth]
    return None


def _disturbs(first: Edit, second: Edit) -> bool:
    """Check whether the first takes away, or names otherwise, what the second is about."""
    if isinstance(first, InsertMember):
        return False
    if isinstance(first, RenameKey) and isinstance(second, RenameKey):
        return second.made == first.path
    if _is_within(second.made, first.path):
        return True
    return not isinstance(first, RenameKey) and _is_within(second.touched, first.path)


def _overlap(first: KeyPath, second: KeyPath) -> bool:
    return _is_in(first, second) or _is_in(second, first)


def _is_within(path: KeyPath | None, outer: KeyPath | None) -> bool:
    return path is not None and outer is not None and _is_in(path, outer)


def _is_in(path: KeyPath, outer: KeyPath) -> bool:
    return path[: len(outer)] == outer
