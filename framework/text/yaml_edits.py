"""Changes to the text of a run config that keep everything else: comments, order, quotes and layout.

Each result is read again and compared with the value that was meant, so that no layout, however odd, can lead to a file
that says something else: an edit that does not come out as meant is not made.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from framework.errors import ConfigError
from framework.text.document import KeyPath, at, compose_text, document_of, parse_scalar

_PLAIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_INDENT: Final = "  "


@dataclass(frozen=True)
class Rename:
    """Another name for a key."""

    path: KeyPath
    name: str


@dataclass(frozen=True)
class Replace:
    """Another value for a key."""

    path: KeyPath
    value: Any


@dataclass(frozen=True)
class Move:
    """A key with a plain value goes to another section, which is made where there is none.

    Attributes:
        path: where it is.
        to: where it goes.
        kind: key and value that a section that is made has to begin with.
    """

    path: KeyPath
    to: KeyPath
    kind: tuple[str, str] | None = None


Edit = Rename | Replace | Move
Splice = tuple[int, int, str]


def edited(text: str, edit: Edit, path: Path) -> str | None:
    """The text with one edit made, None where it cannot be made for sure.

    Args:
        text: a run config that can be read.
        edit: what to change.
        path: its file, whose ending says YAML or JSON.
    """
    splices = _Text(text, is_json=path.suffix == ".json").splices(edit)
    if splices is None:
        return None
    after = text
    for start, end, written in sorted(splices, reverse=True):
        after = after[:start] + written + after[end:]
    try:
        found = document_of(after, path, name="").value
    except ConfigError:
        return None
    return after if _same(found, edited_value(document_of(text, path, name="").value, edit)) else None


def edited_value(value: Any, edit: Edit) -> Any:
    """Apply the edit to plain values."""
    value = deepcopy(value)
    section = at(value, edit.path[:-1])
    if isinstance(edit, Replace):
        section[edit.path[-1]] = edit.value
    elif isinstance(edit, Rename):
        items = [(edit.name if key == edit.path[-1] else key, item) for key, item in section.items()]
        section.clear()
        section.update(items)
    else:
        moved, home = section.pop(edit.path[-1]), value
        for key in edit.to[:-1]:
            home[key] = dict([edit.kind] if edit.kind else []) if home.get(key) is None else home[key]
            home = home[key]
        home[edit.to[-1]] = moved
    return value


class _Text:
    """Positions of keys and values in a text; offsets are those of the text."""

    def __init__(self, text: str, *, is_json: bool) -> None:
        self.text, self.is_json = text, is_json
        self.begin = 1 if text.startswith("\ufeff") else 0
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.root = compose_text(text[self.begin :], is_json=is_json)

    def splices(self, edit: Edit) -> list[Splice] | None:
        found = self._member(edit.path)
        if found is None:
            return None
        section, key, value = found
        if isinstance(edit, Rename):
            return [(*self._span(key), self._key(edit.name, like=key))]
        if isinstance(value, yaml.ScalarNode) and value.style in ("|", ">"):
            return None
        if isinstance(edit, Replace):
            if not isinstance(value, yaml.ScalarNode) or not value.end_mark.index > value.start_mark.index:
                return None
            as_written = value.value.strip()  # a number in quotes keeps its digits: 1e-3, not 0.001
            keeps = not self.is_json and _is_number(edit.value) and _read(as_written) == edit.value
            return [(*self._span(value), as_written if keeps else self._value(edit.value))]
        return self._move(section, key, value, edit)

    def _move(
        self, section: yaml.MappingNode, key: yaml.ScalarNode, value: yaml.Node, edit: Move
    ) -> list[Splice] | None:
        if not isinstance(value, yaml.ScalarNode) or key.start_mark.line != value.end_mark.line or len(edit.to) != 2:
            return None
        gone = self._cut(section, key, value)
        end = value.end_mark.index + self.begin
        member = self._key(edit.to[1], like=key) + self.text[key.end_mark.index + self.begin : end]
        comment = "" if section.flow_style else self.text[end : self._line(end)[1]].rstrip()
        home = self._member(edit.to[:1])
        place = home[2] if home is not None else self.root
        if gone is None or (comment and isinstance(place, yaml.MappingNode) and place.flow_style):
            return None
        member += comment
        added = self._new_section(edit, member) if home is None else self._add(home[2], member)
        return None if added is None else [gone, added]

    def _cut(self, section: yaml.MappingNode, key: yaml.ScalarNode, value: yaml.Node) -> Splice | None:
        """Take a member out, in block style with the comment behind it."""
        members = [name for name, _ in section.value]
        start, end = key.start_mark.index + self.begin, value.end_mark.index + self.begin
        if not section.flow_style:
            first, last = self._line(start)
            # The only member cannot go: its section would be null.
            return (first, last, "") if len(members) > 1 and not self.text[first:start].strip() else None
        if len(members) == 1:
            return (start, end, "")
        place = members.index(key)
        if place + 1 < len(members):
            until = members[place + 1].start_mark.index + self.begin
            return (start, until, "") if self.text[end:until].strip() == "," else None
        before = section.value[place - 1][1].end_mark.index + self.begin
        return (before, end, "") if self.text[before:start].strip() == "," else None

    def _add(self, home: yaml.Node, member: str) -> Splice | None:
        """A new last member; an empty section, or one that ends in another section, is left to its owner."""
        if not isinstance(home, yaml.MappingNode) or not home.value:
            return None
        key, value = home.value[-1]
        end = value.end_mark.index + self.begin
        if home.flow_style:
            return (end, end, f", {member}")
        if (
            not isinstance(value, yaml.ScalarNode)
            or value.style in ("|", ">")
            or key.start_mark.line != value.end_mark.line
        ):
            return None
        first, last = self._line(key.start_mark.index + self.begin)
        indent = self.text[first : key.start_mark.index + self.begin]
        if indent.strip():
            return None
        line = indent + member
        return (last, last, line + self.newline if self.text[last - 1] in "\r\n" else self.newline + line)

    def _new_section(self, edit: Move, member: str) -> Splice | None:
        if not isinstance(self.root, yaml.MappingNode):
            return None
        name, first = edit.to[0], ": ".join(map(self._value, edit.kind)) if edit.kind else ""
        if self.root.flow_style:
            end = self.root.value[-1][1].end_mark.index + self.begin
            members = ", ".join(filter(None, (first, member)))
            return (end, end, f", {json.dumps(name) if self.is_json else name}: {{{members}}}")
        size = len(self.text)
        separator = "" if self.text[-1:] in ("\n", "\r") else self.newline
        lines = "".join(f"{_INDENT}{line}{self.newline}" for line in (first, member) if line)
        return (size, size, f"{separator}{name}:{self.newline}{lines}")

    def _member(self, path: KeyPath) -> tuple[yaml.MappingNode, yaml.ScalarNode, yaml.Node] | None:
        """Section, key and value; None where there is no such key, or an alias makes it stand in two places."""
        node, found = self.root, None
        for part in path:
            if not isinstance(node, yaml.MappingNode):
                return None
            found = next(((node, key, value) for key, value in node.value if key.value == part), None)
            if found is None or found[2].start_mark.index < found[1].start_mark.index:
                return None  # the value stands before its key: an alias
            node = found[2]
        return found

    def _span(self, node: yaml.Node) -> tuple[int, int]:
        return node.start_mark.index + self.begin, node.end_mark.index + self.begin

    def _line(self, at: int) -> tuple[int, int]:
        """A whole line with its end."""
        first = max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1
        ends = re.compile(r"\r\n|\n|\r|\Z").search(self.text, at)
        assert ends is not None
        return max(first, self.begin), ends.end()

    def _key(self, name: str | int, *, like: yaml.ScalarNode) -> str:
        if self.is_json or like.style == '"':
            return json.dumps(str(name))
        return f"'{name}'" if like.style == "'" else str(name)

    def _value(self, value: Any) -> str:
        """A scalar or a small section, on one line."""
        if isinstance(value, dict) and not self.is_json:
            return "{" + ", ".join(f"{key}: {self._value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, str) and not self.is_json and _PLAIN.fullmatch(value) and isinstance(_read(value), str):
            return value
        return json.dumps(value, ensure_ascii=False)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read(text: str) -> Any:
    try:
        return parse_scalar(text, name="")
    except ConfigError:
        return None


def _same(one: Any, other: Any) -> bool:
    """Equal in value and type: 1, 1.0 and true are three things, and one way of writing them may be refused."""
    return repr(_sorted(one)) == repr(_sorted(other))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
