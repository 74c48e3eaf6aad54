"""Positions where edits cut a text, and the text that they insert: commas, indentation, and lines
that become empty.

All offsets count in the original text, so that any number of edits is cut in one pass. Hjson, JSON
and the flow style of YAML have commas and braces; in YAML's block style a member is a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_lint.text.document import BYTE_ORDER_MARK, Document, KeyPath, Span, at, parse_scalar
from deepspeed_lint.text.hjson import ENDS_NUMBER

_BLANKS: Final = re.compile(r"[ \t]*")
_REST_OF_LINE: Final = re.compile(
    r"(?:[ \t]|/\*(?:[^*\r\n]|\*(?!/))*\*/)*(?:(?:#|//)[^\r\n]*)?(?=[\r\n]|\Z)"
)
_LINE_END: Final = re.compile(r"\r\n|\n|\r")
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLAIN_TEXT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_PLAIN: Final = "a"  # a key without quotes
_NEEDS_DOUBLE_QUOTES: Final = re.compile(r"['\\\x00-\x1f]")

Splice = tuple[int, int, str]  # text[start:end] becomes the third
_Extent = tuple[int, int]  # text[start:end]


class EditError(Exception):
    """An edit that does not fit a document or its layout."""


@dataclass
class _Value:
    """A new member's value: a plain one, or text as it stood behind a key, with the indentation of
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


class TextEditor:
    """Collects edits of a document and turns them into splices.

    Offsets and paths count in the document as it was read. What a layout does not allow is an
    EditError.
    """

    def __init__(self, document: Document) -> None:
        self.text = document.text
        self.spans = document.spans
        self.root = document.value
        self.syntax = document.syntax
        self.newline = "\r\n" if "\r\n" in self.text else "\n"
        first = next((path for path in self.spans if len(path) == 1), ())
        if self.syntax == "yaml":
            self.indent_unit = "  "
        else:
            self.indent_unit = self._own_indent(first) or "    "
        self._splices: list[Splice] = []
        self._sections: dict[KeyPath, _Section] = {}

    # ---- edits

    def rename(self, path: KeyPath, name: str) -> None:
        """Write another key, quoted as the old one."""
        start, end = self._key(path)
        self._splices.append((start, end, _written_key(name, like=self.text[start:end])))

    def replace(self, path: KeyPath, value: Any) -> None:
        """Write another value.

        A number or word that needs a comma behind it, where text in quotes needed none, gets one.
        """
        start, end = self.spans[path].value
        if self.syntax == "yaml":
            written = self._yaml_value(path, value)
        else:
            written = self._json(value, self._own_indent(path))
        if written[-1] not in '"]}' and self.syntax == "hjson" and not self._ends_number(end):
            written += ","
        self._splices.append((start, end, written))

    def _yaml_value(self, path: KeyPath, value: Any) -> str:
        start, end = self.spans[path].value
        old = self.value_at(path)
        if start == end or self.text[start] in "|>" or isinstance(old, (dict, list)):
            raise EditError("a value that has no place of its own")
        # A number that was text keeps its digits: 1e-3, not 0.001.
        if _is_number(value) and isinstance(old, str) and parse_scalar(old.strip()) == value:
            return old.strip()
        return self._json(value, None)

    def remove(self, path: KeyPath) -> None:
        """Take a member out."""
        self._section(path[:-1]).removed.add(path)

    def insert(self, path: KeyPath, value: Any) -> None:
        """Write a new member."""
        self._add(path, _Value(value))

    def move(self, path: KeyPath, to: KeyPath) -> None:
        """Put the text of a member, from behind its key, at another place."""
        self.remove(path)
        span = self.spans[path]
        begin = self._key(path)[1]
        if self._is_block(path[:-1]):
            end = self._line(path)[1]
        else:
            end = span.value[1]
        inside = [path]
        if "'''" in self.text[begin:end]:
            inside = [inner for inner in self.spans if inner[: len(path)] == path]
        quoted = [
            (start - begin, stop - begin, text)
            for start, stop, text in self._quoted(inside, also_plain=path)
        ]
        tail = spliced(self.text[begin:end], quoted)
        self._add(to, _Value(tail=tail, indent=self._line_indent(span.start)[0]))

    def splices(self) -> list[Splice]:
        """Return everything collected, as non-overlapping splices."""
        splices = list(self._splices)
        cuts: list[_Extent] = []
        for path, section in self._sections.items():
            members = [(*path, key) for key in self.value_at(path)]
            if members and members[-1] not in self.spans:
                raise EditError("the last member is an alias")
            if self._is_block(path):
                splices += self._changed_lines(path, members, section)
            elif section.new and members and members[-1] in section.removed:
                cuts += self._cuts(section.removed - {members[-1]})
                splices.append(self._instead(members, section.new))
            else:
                cuts += self._cuts(section.removed)
                if section.new or not members:
                    splices += self._added(path, members, section.new)
                else:
                    cuts += self._last_comma(members, section.removed)
                    splices += self._braces_of_nothing(path, members, section.removed)
        return splices + self._deletions(sorted(cuts))

    def _added(self, path: KeyPath, members: Sequence[KeyPath], new: _New) -> list[Splice]:
        if members:
            return self._append(members, new)
        return [self._fill(path, new)]

    def _braces_of_nothing(
        self, path: KeyPath, members: Sequence[KeyPath], removed: set[KeyPath]
    ) -> list[Splice]:
        """Write {} for a document without braces that loses all its members."""
        if removed.issuperset(members) and not self._has_braces(path):
            return [self._at_end("{}")]
        return []

    def requoted(self, splices: Sequence[Splice]) -> list[Splice]:
        """Return splices that write every ''' text outside the given ones in double quotes."""
        return [
            quoted
            for quoted in self._quoted(self.spans)
            if not any(_overlap(quoted, other) for other in splices)
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

    def _quoted(
        self, paths: Iterable[KeyPath], *, also_plain: KeyPath | None = None
    ) -> list[Splice]:
        """Return splices that write the ''' texts among the values, and the text without quotes at
        one path, in double quotes.
        """
        if self.syntax != "hjson":
            return []
        quoted = []
        for path in paths:
            start, end = self.spans[path].value
            value = self.value_at(path)
            is_many_lines = self.text.startswith("'''", start) and isinstance(value, str)
            if is_many_lines or (path == also_plain and self._is_plain(path)):
                quoted.append((start, end, json.dumps(value, ensure_ascii=False)))
        return quoted

    # ---- the layout

    def value_at(self, path: KeyPath) -> Any:
        """Return the value at a path."""
        return at(self.root, path)

    def _key(self, path: KeyPath) -> tuple[int, int]:
        key = self.spans[path].key
        assert key is not None
        return key

    def _is_plain(self, path: KeyPath) -> bool:
        """Check whether the value is text without quotes, which goes to the end of its line."""
        is_text = self.syntax == "hjson" and isinstance(self.value_at(path), str)
        return is_text and self.text[self.spans[path].value[0]] not in "\"'"

    def _has_braces(self, path: KeyPath) -> bool:
        """Check whether the value is an object with braces: the root may do without, and all block
        style does.
        """
        return self.text.startswith("{", self.spans[path].value[0])

    def _is_block(self, path: KeyPath) -> bool:
        return self.syntax == "yaml" and not self._has_braces(path)

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
        end = _match_end(_BLANKS, self.text, begin)
        return self.text[begin : min(end, at)], end >= at

    def _separator(self, members: Sequence[KeyPath]) -> str:
        """Return the separator of members on lines of their own: nothing where several stand
        without commas.
        """
        is_bare = len(members) > 1 and all(self.spans[path].comma is None for path in members)
        if is_bare and self._own_indent(members[-1]) is not None:
            return ""
        return ","

    def _ends_number(self, at: int) -> bool:
        """Check whether a number may stand before an offset: what follows on the line would
        otherwise make it text.
        """
        return bool(ENDS_NUMBER.match(self.text, _match_end(_BLANKS, self.text, at)))

    # ---- block style

    def _line(self, path: KeyPath) -> tuple[int, int]:
        """Return start and end of the line that is a member, with the comment in it, without the
        blanks at its end.
        """
        span = self.spans[path]
        indent, is_first = self._line_indent(span.start)
        end = _match_end(_REST_OF_LINE, self.text, span.value[1])
        is_line = is_first and end >= 0 and not _LINE_END.search(self.text, span.start, end)
        if not is_line or span.value[0] == span.value[1]:
            raise EditError("a member that is no line")
        return span.start - len(indent), len(self.text[:end].rstrip(" \t"))

    def _changed_lines(
        self, path: KeyPath, members: Sequence[KeyPath], section: _Section
    ) -> Iterator[Splice]:
        """Yield the splices of a section in block style."""
        if section.removed.issuperset(members):
            raise EditError("without its members the section is null")
        for member in section.removed:
            start, end = self._line(member)
            line_end = _LINE_END.search(self.text, end)
            yield start, line_end.end() if line_end else len(self.text), ""
        for name, body in section.new.items():
            if not isinstance(body, dict):
                start, end = self._line(members[-1])
                indent = self.text[start : self.spans[members[-1]].start]
                yield end, end, self.newline + indent + self._member(name, body, indent, _PLAIN)
            elif not path:
                inner = self._members(body, indent=self.indent_unit, comma="")
                yield self._at_end(f"{name}:{self.newline}{self.indent_unit}{inner}")
            else:
                raise EditError("a new section inside of another one")

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
        """Return the comma that is left before the closing brace, if none stood there before."""
        kept = [path for path in members if path not in removed]
        last = members[-1]
        if not kept or last not in removed or self.spans[last].comma is not None:
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
        blanks, is_first = self._line_indent(start)
        behind = _match_end(_BLANKS, self.text, end)
        is_last = self.text[behind : behind + 1] in ("", "\r", "\n")
        if is_first and is_last:  # the whole line
            line_end = _LINE_END.match(self.text, behind)
            return start - len(blanks), line_end.end() if line_end else behind
        if self.text[start:end] == ",":
            return start, end
        if is_first or not (is_last or self.text[behind] == "}"):
            return start, behind
        blanks_start = len(self.text[:start].rstrip(" \t"))
        return blanks_start, behind if is_last else end

    # ---- what comes

    def _fill(self, path: KeyPath, new: _New) -> Splice:
        """Write the first members of an empty object."""
        begin, end = self.spans[path].value
        indent = self._line_indent(self.spans[path].start)[0]
        if not self._has_braces(path):  # an empty document
            return self._at_end(self._object(new, indent=""))
        if not self.text[begin + 1 : end - 1].strip(" \t\r\n"):
            is_laid_out = self._own_indent(path) is not None and _LINE_END.search(self.text)
            return begin, end, self._object(new, indent=indent if is_laid_out else None)
        line_end = _match_end(_REST_OF_LINE, self.text, begin + 1)
        if begin < line_end < end:
            inner = indent + self.indent_unit
            return line_end, line_end, self.newline + inner + self._members(new, indent=inner)
        return begin + 1, begin + 1, self._members(new)

    def _instead(self, members: Sequence[KeyPath], new: _New) -> Splice:
        """Write new members in the place of the last one."""
        last = self.spans[members[-1]]
        indent = self._own_indent(members[-1])
        written = self._members(new, indent=indent, like=last, comma=self._separator(members))
        return last.start, last.value[1], written

    def _append(self, members: Sequence[KeyPath], new: _New) -> list[Splice]:
        """Write new members behind the last one: on lines of their own where it has one."""
        last = self.spans[members[-1]]
        is_plain = self._is_plain(members[-1])
        indent = self._own_indent(members[-1])
        if indent is None and is_plain:  # its text goes to the end of the line
            indent = self._line_indent(last.start)[0]
        if last.comma is None:
            end = last.value[1]
            trailing = ""
        else:
            end = last.comma + 1
            trailing = ","
        if indent is None:
            written = self._members(new, like=last)
            if trailing:
                return [(end, end, f" {written},")]
            return [(end, end, f", {written}")]
        comma = self._separator(members)
        lines = self._members(new, indent=indent, like=last, comma=comma)
        written = self.newline + indent + lines + trailing
        separator = "" if trailing or is_plain else comma
        line_end = _match_end(_REST_OF_LINE, self.text, end)
        if line_end < 0 or line_end == end:
            return [(end, end, separator + written)]
        splices = [(line_end, line_end, written)]
        if separator:
            splices.insert(0, (end, end, separator))
        return splices

    def _members(
        self, new: _New, *, indent: str | None = None, like: Span | None = None, comma: str = ","
    ) -> str:
        """Return the text of new members.

        Args:
            new: the members.
            indent: of the line of each; None for all on one line.
            like: the member that their keys are quoted as.
            comma: what stands between two.
        """
        if like is not None and like.key:
            start, end = like.key
            quoting = self.text[start:end]
        elif self.syntax == "yaml":
            quoting = _PLAIN
        else:
            quoting = '"'
        if indent is None:
            separator = f"{comma} "
        else:
            separator = comma + self.newline + indent
        members = [self._member(name, body, indent, quoting) for name, body in new.items()]
        return separator.join(members)

    def _member(self, name: str, body: _Value | _New, indent: str | None, quoting: str) -> str:
        behind = self._behind_key(body, indent)
        # a comment stands there: only a quoted key may have one
        if not behind.lstrip(" \t\r\n").startswith(":"):
            quoting = '"'
        return _written_key(name, like=quoting) + behind

    def _behind_key(self, body: _Value | _New, indent: str | None) -> str:
        if isinstance(body, dict):
            return ": " + self._object(body, indent=indent)
        if not body.tail:
            return ": " + self._json(body.value, indent)
        if indent is None or indent == body.indent or "/*" in body.tail:
            return body.tail
        lines = re.compile(f"({_LINE_END.pattern}){re.escape(body.indent)}")
        return lines.sub(lambda match: match[1] + indent, body.tail)

    def _object(self, new: _New, *, indent: str | None) -> str:
        """Return the text of an object of new members."""
        if indent is None:
            return "{" + self._members(new) + "}"
        inner_indent = indent + self.indent_unit
        members = self._members(new, indent=inner_indent)
        return "{" + self.newline + inner_indent + members + self.newline + indent + "}"

    def _json(self, value: Any, indent: str | None) -> str:
        """Return the text of a value, as JSON; in YAML without quotes where none are needed."""
        if self.syntax == "yaml":
            if isinstance(value, dict):
                members = [f"{key}: {self._json(item, None)}" for key, item in value.items()]
                return "{" + ", ".join(members) + "}"
            if isinstance(value, str) and _is_plain_text(value):
                return value
        unit = None if indent is None else self.indent_unit
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=unit)
        return text.replace("\n", f"{self.newline}{indent}")

    def _at_end(self, written: str) -> Splice:
        """Write a line at the end of the document."""
        end = len(self.text)
        is_new_line = self.text.removeprefix(BYTE_ORDER_MARK)[-1:] in ("", "\r", "\n")
        if not is_new_line:
            written = self.newline + written
        return end, end, written + self.newline


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    if match:
        return match.end()
    return -1


def _comma(span: Span) -> list[_Extent]:
    """Return the extent of the comma behind a member; nothing if it has none."""
    if span.comma is None:
        return []
    return [(span.comma, span.comma + 1)]


def _overlap(first: Splice, second: Splice) -> bool:
    return first[0] < second[1] and second[0] < first[1]


def _is_plain_text(text: str) -> bool:
    """Check whether YAML reads a text without quotes as the same text."""
    return _PLAIN_TEXT.fullmatch(text) is not None and isinstance(parse_scalar(text), str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _written_key(name: str, *, like: str) -> str:
    """Return a key, quoted as another one is."""
    if like[0] == "'" and not _NEEDS_DOUBLE_QUOTES.search(name):
        return f"'{name}'"
    if like[0] not in "\"'" and _PLAIN_KEY.fullmatch(name):
        return name
    return json.dumps(name, ensure_ascii=False)
