"""Positions where edits cut the text of a JSON file, and the text that they insert: commas,
indentation, and lines that become empty.

All offsets count in the original text, so that any number of edits is cut in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_lint.text.document import BYTE_ORDER_MARK, Document, KeyPath, Span, at

_BLANKS: Final = re.compile(r"[ \t]*")
_LINE_END: Final = re.compile(r"\r\n|\n|\r")

Splice = tuple[int, int, str]  # text[start:end] becomes the third
_Extent = tuple[int, int]  # text[start:end]


class EditError(Exception):
    """An edit that does not fit a document or its layout."""


@dataclass
class _Value:
    """A new member's value: a plain one, or text as it stood after a key, with the indentation of
    its line there.
    """

    value: Any = None
    tail: str = ""
    indent: str = ""


_New = dict[str, "_Value | _New"]


@dataclass
class _Section:
    """Changes among the members of one object."""

    removed: set[KeyPath] = field(default_factory=set)
    new: _New = field(default_factory=dict)


def spliced(text: str, splices: Iterable[Splice]) -> str:
    """Return the text with all splices made.

    Raises:
        EditError: they overlap.
    """
    parts: list[str] = []
    done = 0
    for start, end, written in sorted(splices, key=lambda splice: splice[:2]):
        if start < done:
            raise EditError("splices overlap")
        parts.append(text[done:start])
        parts.append(written)
        done = end
    parts.append(text[done:])
    return "".join(parts)


class JsonEditor:
    """Collects edits of a JSON document and turns them into splices.

    Offsets and paths count in the document as it was read.
    """

    def __init__(self, document: Document) -> None:
        self.text = document.text
        self.spans = document.spans
        self.root = document.value
        self.newline = "\r\n" if "\r\n" in self.text else "\n"
        first = next((path for path in self.spans if len(path) == 1), ())
        self.indent_unit = self._own_indent(first) or "    "
        self._splices: list[Splice] = []
        self._sections: dict[KeyPath, _Section] = {}

    # ---- edits

    def rename(self, path: KeyPath, name: str) -> None:
        """Write another key."""
        start, end = self._key(path)
        self._splices.append((start, end, json.dumps(name, ensure_ascii=False)))

    def replace(self, path: KeyPath, value: Any) -> None:
        """Write another value."""
        start, end = self.spans[path].value
        self._splices.append((start, end, self._json(value, self._own_indent(path))))

    def remove(self, path: KeyPath) -> None:
        """Take a member out."""
        self._section(path[:-1]).removed.add(path)

    def insert(self, path: KeyPath, value: Any) -> None:
        """Write a new member."""
        self._add(path, _Value(value))

    def move(self, path: KeyPath, to: KeyPath) -> None:
        """Put the text of a member, from after its key, at another place."""
        self.remove(path)
        span = self.spans[path]
        tail = self.text[self._key(path)[1] : span.value[1]]
        self._add(to, _Value(tail=tail, indent=self._line_indent(span.start)[0]))

    def splices(self) -> list[Splice]:
        """Return everything collected, as non-overlapping splices."""
        splices = list(self._splices)
        cuts: list[_Extent] = []
        for path, section in self._sections.items():
            members = [(*path, key) for key in at(self.root, path)]
            cuts += self._removals(members, section)
            if section.new:
                splices.append(self._addition(path, members, section))
        return splices + self._deletions(sorted(cuts))

    def _removals(self, members: Sequence[KeyPath], section: _Section) -> list[_Extent]:
        """Return what is cut out of a section; new members take the place of the last one."""
        removed = section.removed
        if section.new:
            return self._cuts(removed - set(members[-1:]))
        return self._cuts(removed) + self._last_comma(members, removed)

    def _addition(self, path: KeyPath, members: Sequence[KeyPath], section: _Section) -> Splice:
        if not members:
            return self._fill(path, section.new)
        if members[-1] in section.removed:
            return self._instead(members[-1], section.new)
        return self._append(members[-1], section.new)

    def _section(self, path: KeyPath) -> _Section:
        return self._sections.setdefault(path, _Section())

    def _add(self, path: KeyPath, value: _Value) -> None:
        """Note a new member of the innermost section on its path that is there, with the missing
        sections around it.
        """
        depth = max(depth for depth in range(len(path)) if path[:depth] in self.spans)
        new = self._section(path[:depth]).new
        for key in path[depth:-1]:
            inner = new.setdefault(str(key), {})
            assert isinstance(inner, dict)
            new = inner
        new[str(path[-1])] = value

    # ---- the layout

    def _key(self, path: KeyPath) -> tuple[int, int]:
        key = self.spans[path].key
        assert key is not None
        return key

    def _own_indent(self, path: KeyPath) -> str | None:
        """Return the indentation of a member that is the first of its line; None for any other."""
        indent, is_first = self._line_indent(self.spans[path].start)
        if is_first:
            return indent
        return None

    def _line_indent(self, at: int) -> tuple[str, bool]:
        """Return the blanks at the begin of an offset's line, and whether only they stand before
        it.
        """
        begin = max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1
        if begin == 0 and self.text.startswith(BYTE_ORDER_MARK):
            begin = 1
        end = self._blanks_end(begin)
        return self.text[begin : min(end, at)], end >= at

    def _blanks_end(self, begin: int) -> int:
        blanks = _BLANKS.match(self.text, begin)
        assert blanks is not None
        return blanks.end()

    # ---- what goes

    def _cuts(self, removed: Iterable[KeyPath]) -> list[_Extent]:
        """Return the extents of removed members and of their commas."""
        cuts: list[_Extent] = []
        for path in removed:
            span = self.spans[path]
            cuts.append((span.start, span.value[1]))
            cuts += _comma(span)
        return cuts

    def _last_comma(self, members: Sequence[KeyPath], removed: set[KeyPath]) -> list[_Extent]:
        """Return the comma that is left before the closing brace."""
        kept = [path for path in members if path not in removed]
        if not kept or members[-1] not in removed:
            return []
        return _comma(self.spans[kept[-1]])

    def _deletions(self, cuts: Sequence[_Extent]) -> list[Splice]:
        """Join the cuts over the blanks between them, and widen them by what becomes empty: blanks,
        or the whole line.
        """
        blocks: list[_Extent] = []
        for start, end in cuts:
            if blocks and not self.text[blocks[-1][1] : start].strip(" \t"):
                blocks[-1] = (blocks[-1][0], end)
            else:
                blocks.append((start, end))
        deletions = []
        for start, end in blocks:
            wide_start, wide_end = self._widened(start, end)
            deletions.append((wide_start, wide_end, ""))
        return deletions

    def _widened(self, start: int, end: int) -> _Extent:
        """Return a cut with the blanks beside it, or with its line if nothing else stands there."""
        blanks, is_first = self._line_indent(start)
        behind = self._blanks_end(end)
        is_last = self.text[behind : behind + 1] in ("", "\r", "\n")
        if is_first and is_last:
            return start - len(blanks), self._behind_line_end(behind)
        if self.text[start:end] == ",":
            return start, end
        if is_first or not (is_last or self.text[behind] == "}"):
            return start, behind  # something else follows on the line
        blanks_start = len(self.text[:start].rstrip(" \t"))
        return blanks_start, behind if is_last else end

    def _behind_line_end(self, at: int) -> int:
        line_end = _LINE_END.match(self.text, at)
        if line_end is None:
            return at
        return line_end.end()

    # ---- what comes

    def _fill(self, path: KeyPath, new: _New) -> Splice:
        """Write the first members of an empty object."""
        begin, end = self.spans[path].value
        indent = None
        if self._own_indent(path) is not None and _LINE_END.search(self.text):
            indent = self._line_indent(self.spans[path].start)[0]
        return begin, end, self._object(new, indent=indent)

    def _instead(self, last: KeyPath, new: _New) -> Splice:
        """Write new members in the place of the last one."""
        span = self.spans[last]
        return span.start, span.value[1], self._members(new, indent=self._own_indent(last))

    def _append(self, last: KeyPath, new: _New) -> Splice:
        """Write new members after the last one: on lines of their own where it has one."""
        end = self.spans[last].value[1]
        indent = self._own_indent(last)
        members = self._members(new, indent=indent)
        if indent is None:
            return end, end, f", {members}"
        return end, end, "," + self.newline + indent + members

    def _members(self, new: _New, *, indent: str | None) -> str:
        """Return the text of new members: each on a line with an indentation, or all on one line
        with None.
        """
        separator = ", "
        if indent is not None:
            separator = "," + self.newline + indent
        members = []
        for name, body in new.items():
            key = json.dumps(name, ensure_ascii=False)
            members.append(key + self._behind_key(body, indent))
        return separator.join(members)

    def _behind_key(self, body: _Value | _New, indent: str | None) -> str:
        """Return colon and value of a new member; the lines of a moved one get the indentation."""
        if isinstance(body, dict):
            return ": " + self._object(body, indent=indent)
        if not body.tail:
            return ": " + self._json(body.value, indent)
        if indent is None or indent == body.indent:
            return body.tail
        lines = re.compile(f"({_LINE_END.pattern}){re.escape(body.indent)}")
        return lines.sub(lambda match: match[1] + indent, body.tail)

    def _object(self, new: _New, *, indent: str | None) -> str:
        """Return the text of an object of new members."""
        if indent is None:
            return "{" + self._members(new, indent=None) + "}"
        inner_indent = indent + self.indent_unit
        members = self._members(new, indent=inner_indent)
        return "{" + self.newline + inner_indent + members + self.newline + indent + "}"

    def _json(self, value: Any, indent: str | None) -> str:
        """Return the text of a value."""
        unit = None if indent is None else self.indent_unit
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=unit)
        return text.replace("\n", f"{self.newline}{indent}")


def _comma(span: Span) -> list[_Extent]:
    """Return the extent of the comma after a member; nothing if it has none."""
    if span.comma is None:
        return []
    return [(span.comma, span.comma + 1)]
