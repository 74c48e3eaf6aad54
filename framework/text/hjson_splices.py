"""Positions where edits cut a Hjson text, and the text that they insert: commas, indentation, and lines that become
empty.

All offsets are those of the original text, so that any number of edits is cut in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from framework.text.document import KeyPath, at
from framework.text.hjson import HjsonDocument, Span
from framework.text.hjson_scan import BYTE_ORDER_MARK, ENDS_NUMBER

# Layout of a Hjson text: lines, indentation, separators.


BLANKS: Final = re.compile(r"[ \t]*")
REST_OF_LINE: Final = re.compile(r"(?:[ \t]|/\*(?:[^*\r\n]|\*(?!/))*\*/)*(?:(?:#|//)[^\r\n]*)?(?=[\r\n]|\Z)")
LINE_END: Final = re.compile(r"\r\n|\n|\r")
_DEFAULT_INDENT: Final = "    "


def match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match at an offset; -1 without one."""
    match = pattern.match(text, at)
    return match.end() if match else -1


class TextLayout:
    """Answers questions about the text of a document; offsets and paths are those of the document."""

    def __init__(self, document: HjsonDocument) -> None:
        self.text, self.spans, self._root = document.text, document.spans, document.value
        self.newline = "\r\n" if "\r\n" in self.text else "\n"
        first = next((path for path in self.spans if len(path) == 1), ())
        self.indent_unit = self.own_indent(first) or _DEFAULT_INDENT

    def value_at(self, path: KeyPath) -> Any:
        """The value at a path."""
        return at(self._root, path)

    def is_plain(self, path: KeyPath) -> bool:
        """Check whether the value is text without quotes, which goes to the end of its line."""
        return isinstance(self.value_at(path), str) and self.text[self.spans[path].value[0]] not in "\"'"

    def has_braces(self, path: KeyPath) -> bool:
        """Check whether the value is an object with braces: the root may do without."""
        return self.text.startswith("{", self.spans[path].value[0])

    def own_indent(self, path: KeyPath) -> str | None:
        """The indentation of a member that is the first of its line; None for any other."""
        indent, is_first = self.line_indent(self.spans[path].start)
        return indent if is_first else None

    def line_indent(self, at: int) -> tuple[str, bool]:
        """The blanks that begin the line of an offset, and whether nothing else stands before it."""
        begin = max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1
        if begin == 0 and self.text.startswith(BYTE_ORDER_MARK):
            begin = 1
        end = match_end(BLANKS, self.text, begin)
        return self.text[begin : min(end, at)], end >= at

    def separator(self, members: Sequence[KeyPath]) -> str:
        """Return the separator of members on lines of their own: nothing where several stand without commas."""
        is_bare = len(members) > 1 and all(self.spans[path].comma is None for path in members)
        return "" if is_bare and self.own_indent(members[-1]) is not None else ","

    def ends_number(self, at: int) -> bool:
        """Check whether a number may stand before an offset: what follows on the line would otherwise make it text."""
        return bool(ENDS_NUMBER.match(self.text, match_end(BLANKS, self.text, at)))


_PLAIN_KEY: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NEEDS_DOUBLE_QUOTES: Final = re.compile(r"['\\\x00-\x1f]")


class Splice(NamedTuple):
    """``text[start:end]`` becomes `written`."""

    start: int
    end: int
    written: str = ""


@dataclass
class _Value:
    """A new member's value: a plain one, or text as it stood behind a key, with the indentation of its line there."""

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
    """The text with all splices made; they must not overlap."""
    parts: list[str] = []
    done = 0
    for start, end, written in sorted(splices, key=lambda splice: splice[:2]):
        assert start >= done, "splices overlap"
        parts += text[done:start], written
        done = end
    return "".join([*parts, text[done:]])


class TextEditor(TextLayout):
    """Collects edits and turns them into splices."""

    def __init__(self, document: HjsonDocument) -> None:
        super().__init__(document)
        self._splices: list[Splice] = []
        self._sections: dict[KeyPath, _Section] = {}

    def rename(self, path: KeyPath, name: str) -> None:
        """Another key, quoted as the old one."""
        key = self.spans[path].key
        assert key is not None
        self._splices.append(Splice(*key, _written_key(name, like=self.text[slice(*key)])))

    def replace(self, path: KeyPath, value: Any) -> None:
        """Another value; what needs a comma behind it, where text in quotes needed none, gets one."""
        span = self.spans[path]
        written = self._json(value, self.own_indent(path))
        if written[-1] not in '"]}' and not self.ends_number(span.value[1]):
            written += ","
        self._splices.append(Splice(*span.value, written))

    def remove(self, path: KeyPath) -> None:
        """No member here."""
        self._section(path[:-1]).removed.add(path)

    def insert(self, path: KeyPath, value: Any) -> None:
        """A new member."""
        self._add(path, _Value(value))

    def move(self, path: KeyPath, to: KeyPath) -> None:
        """The text of a member, from behind its key, at another place."""
        self.remove(path)
        span = self.spans[path]
        assert span.key is not None
        begin, end = span.key[1], span.value[1]
        has_many_lines = "'''" in self.text[begin:end]
        inside = [inner for inner in self.spans if inner[: len(path)] == path] if has_many_lines else [path]
        quoted = [
            Splice(splice.start - begin, splice.end - begin, splice.written)
            for splice in self._quoted(inside, also_plain=path)
        ]
        tail = spliced(self.text[begin:end], quoted)
        self._add(to, _Value(tail=tail, indent=self.line_indent(span.start)[0]))

    def splices(self) -> list[Splice]:
        """Everything collected, as non-overlapping splices."""
        splices = list(self._splices)
        cuts: list[tuple[int, int]] = []
        for path, section in self._sections.items():
            members = [(*path, key) for key in self.value_at(path)]
            if not members:
                splices.append(self._fill(path, section.new))
            elif not section.new:
                cuts += self._cuts(section.removed) + self._last_comma(members, section.removed)
                if section.removed.issuperset(members) and not self.has_braces(path):
                    splices.append(self._at_end("{}"))
            elif members[-1] in section.removed:
                cuts += self._cuts(section.removed - {members[-1]})
                splices.append(self._instead(members, section.new))
            else:
                cuts += self._cuts(section.removed)
                splices += self._append(members, section.new)
        return splices + self._deletions(sorted(cuts))

    def requoted(self, splices: Sequence[Splice]) -> list[Splice]:
        """Splices that write every ''' text outside the given ones in double quotes."""
        return [
            new
            for new in self._quoted(self.spans)
            if not any(old.start < new.end and new.start < old.end for old in splices)
        ]

    def _section(self, path: KeyPath) -> _Section:
        return self._sections.setdefault(path, _Section())

    def _add(self, path: KeyPath, value: _Value) -> None:
        depth = max(depth for depth in range(len(path)) if path[:depth] in self.spans)
        new = self._section(path[:depth]).new
        for key in path[depth:-1]:
            inner = new.setdefault(str(key), {})
            assert isinstance(inner, dict)
            new = inner
        new[str(path[-1])] = value

    def _quoted(self, paths: Iterable[KeyPath], *, also_plain: KeyPath | None = None) -> list[Splice]:
        """The ''' texts among the values, and the text without quotes at one path, in double quotes."""
        quoted = []
        for path in paths:
            start, end = self.spans[path].value
            is_many_lines = self.text.startswith("'''", start) and isinstance(self.value_at(path), str)
            if is_many_lines or (path == also_plain and self.is_plain(path)):
                quoted.append(Splice(start, end, json.dumps(self.value_at(path), ensure_ascii=False)))
        return quoted

    # ---- what goes

    def _cuts(self, removed: Iterable[KeyPath]) -> list[tuple[int, int]]:
        """Removed members and their commas."""
        cuts: list[tuple[int, int]] = []
        for path in removed:
            span = self.spans[path]
            cuts += [(span.start, span.value[1]), *_comma(span)]
        return cuts

    def _last_comma(self, members: Sequence[KeyPath], removed: set[KeyPath]) -> list[tuple[int, int]]:
        """The comma that would stand before the closing brace, where none stood before."""
        kept = [path for path in members if path not in removed]
        stays = not kept or members[-1] not in removed or self.spans[members[-1]].comma is not None
        return [] if stays else _comma(self.spans[kept[-1]])

    def _deletions(self, cuts: Sequence[tuple[int, int]]) -> list[Splice]:
        """The cuts, joined over the blanks between them, with the line and the blanks that nobody needs afterwards."""
        blocks: list[tuple[int, int]] = []
        for start, end in cuts:
            if blocks and not self.text[blocks[-1][1] : start].strip(" \t"):
                blocks[-1] = (blocks[-1][0], end)
            else:
                blocks.append((start, end))
        return [Splice(*self._widened(start, end)) for start, end in blocks]

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        blanks, is_first = self.line_indent(start)
        behind = match_end(BLANKS, self.text, end)
        is_last = self.text[behind : behind + 1] in ("", "\r", "\n")
        if is_first and is_last:  # the whole line
            line_end = LINE_END.match(self.text, behind)
            return start - len(blanks), line_end.end() if line_end else behind
        if self.text[start:end] == ",":
            return start, end
        if is_first or not (is_last or self.text[behind] == "}"):
            return start, behind
        before = self.text[:start]
        return len(before.rstrip(" \t")), behind if is_last else end

    # ---- what comes

    def _fill(self, path: KeyPath, new: _New) -> Splice:
        """The first members of an empty object."""
        begin, end = self.spans[path].value
        indent = self.line_indent(self.spans[path].start)[0]
        if not self.has_braces(path):  # an empty document
            return self._at_end(self._written(new, indent=""))
        if not self.text[begin + 1 : end - 1].strip(" \t\r\n"):
            is_laid_out = self.own_indent(path) is not None and LINE_END.search(self.text)
            return Splice(begin, end, self._written(new, indent=indent if is_laid_out else None))
        line_end = match_end(REST_OF_LINE, self.text, begin + 1)
        if begin < line_end < end:
            inner = indent + self.indent_unit
            return Splice(line_end, line_end, self.newline + inner + self._members(new, indent=inner))
        return Splice(begin + 1, begin + 1, self._members(new))

    def _instead(self, members: Sequence[KeyPath], new: _New) -> Splice:
        """New members in the place of the last one."""
        last = self.spans[members[-1]]
        indent = self.own_indent(members[-1])
        written = self._members(new, indent=indent, like=last, comma=self.separator(members))
        return Splice(last.start, last.value[1], written)

    def _append(self, members: Sequence[KeyPath], new: _New) -> list[Splice]:
        """New members behind the last one: on lines of their own where it has one."""
        last, comma = self.spans[members[-1]], self.separator(members)
        is_plain = self.is_plain(members[-1])
        indent = self.own_indent(members[-1])
        if indent is None and is_plain:  # its text goes to the end of the line
            indent = self.line_indent(last.start)[0]
        trailing = "," if last.comma is not None else ""
        end = last.value[1] if last.comma is None else last.comma + 1
        if indent is None:
            written = self._members(new, like=last)
            return [Splice(end, end, f" {written}," if trailing else f", {written}")]
        written = self.newline + indent + self._members(new, indent=indent, like=last, comma=comma) + trailing
        line_end = match_end(REST_OF_LINE, self.text, end)
        place = end if line_end < 0 else line_end
        separator = "" if trailing or is_plain else comma
        if place == end:
            return [Splice(end, end, separator + written)]
        return [*([Splice(end, end, separator)] if separator else []), Splice(place, place, written)]

    def _members(self, new: _New, *, indent: str | None = None, like: Span | None = None, comma: str = ",") -> str:
        key = like.key if like else None
        quoting = self.text[slice(*key)] if key else '"'
        between = comma + (" " if indent is None else self.newline + indent)
        return between.join(self._member(name, body, indent, quoting) for name, body in new.items())

    def _member(self, name: str, body: _Value | _New, indent: str | None, quoting: str) -> str:
        behind = self._behind_key(body, indent)
        if not behind.lstrip(" \t\r\n").startswith(":"):  # a comment stands there: only a quoted key may have one
            quoting = '"'
        return _written_key(name, like=quoting) + behind

    def _behind_key(self, body: _Value | _New, indent: str | None) -> str:
        if isinstance(body, dict):
            return ": " + self._written(body, indent=indent)
        if not body.tail:
            return ": " + self._json(body.value, indent)
        if indent is None or indent == body.indent or "/*" in body.tail:
            return body.tail
        lines = re.compile(f"({LINE_END.pattern}){re.escape(body.indent)}")
        return lines.sub(lambda match: match[1] + indent, body.tail)

    def _written(self, new: _New, *, indent: str | None) -> str:
        """An object of new members."""
        if indent is None:
            return "{" + self._members(new) + "}"
        inner = self.newline + indent + self.indent_unit
        return "{" + inner + self._members(new, indent=indent + self.indent_unit) + self.newline + indent + "}"

    def _json(self, value: Any, indent: str | None) -> str:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, indent=None if indent is None else self.indent_unit
        )
        return text.replace("\n", f"{self.newline}{indent}")

    def _at_end(self, written: str) -> Splice:
        is_new_line = self.text.removeprefix(BYTE_ORDER_MARK)[-1:] in ("", "\r", "\n")
        return Splice(len(self.text), len(self.text), ("" if is_new_line else self.newline) + written + self.newline)


def _comma(span: Span) -> list[tuple[int, int]]:
    return [] if span.comma is None else [(span.comma, span.comma + 1)]


def _written_key(name: str, *, like: str) -> str:
    """A key, quoted as another one is."""
    if like[0] == "'" and not _NEEDS_DOUBLE_QUOTES.search(name):
        return f"'{name}'"
    if like[0] not in "\"'" and _PLAIN_KEY.fullmatch(name):
        return name
    return json.dumps(name, ensure_ascii=False)
