"""Reads DeepSpeed JSON as DeepSpeed does, which is Hjson, together with the place and the extent of every key and
value.

DeepSpeed reads its file with the `hjson` package: comments, commas too many or left out, text without quotes. That
package gives no positions and reads without bound; here every problem has a line, every edit finds its characters, and
a hostile file costs a bounded amount of time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from framework.errors import ConfigError, Problem
from framework.text.document import MAX_BYTES, MAX_DEPTH, MAX_VALUES, Document, KeyPath, read_text, too_deep
from framework.text.hjson_scan import BYTE_ORDER_MARK, ScanError, Scanner

MAX_DUPLICATES: Final = 100
MAX_KEY: Final = 1_024  # as in YAML
_CLOSING: Final[Mapping[str, str]] = {"{": "}", "[": "]"}
_WORD: Final = re.compile(r"-?\w+")
# Words of Python and JavaScript, each with what JSON has for it.
_FOREIGN: Final[Mapping[str, str]] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "undefined": "null",
    **dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "a finite number"),
}
_MISLEADING: Final = (",", "}", "]", '"', " #", "//", "/*")


class Span(NamedTuple):
    """The extent of one member in the text, in characters: ``text[start:end]``.

    Attributes:
        key: the key as it is written, with its quotes; None for an element of a list and for the whole document.
        value: the value as it is written, without the blanks around it.
        comma: offset of the comma that follows; None where there is none.
    """

    key: tuple[int, int] | None
    value: tuple[int, int]
    comma: int | None = None

    @property
    def start(self) -> int:
        """Return the start of the member: its key, or its value where it has none."""
        return self.value[0] if self.key is None else self.key[0]

    @property
    def member(self) -> tuple[int, int]:
        """Key, value and comma; a comment before the comma is inside."""
        return self.start, self.value[1] if self.comma is None else self.comma + 1


@dataclass
class HjsonDocument(Document):
    """Plain values, the place of each and its extent in the text.

    Attributes:
        text: what was read, character for character.
        spans: path -> extent; ``()`` is the whole document; where the text has no braces it goes to the end of the
            text.
    """

    text: str = ""
    spans: dict[KeyPath, Span] = field(default_factory=dict)


def read_hjson(path: Path, *, name: str) -> HjsonDocument:
    """Read a DeepSpeed JSON file (at most 1 MB, UTF-8); `text` of the result encodes to the bytes of the file.

    Raises:
        ConfigError: it is not there, not text, too large, or nothing that DeepSpeed could read.
    """
    return parse_hjson(read_text(path, name=name), name=name)


def parse_hjson(text: str, *, name: str) -> HjsonDocument:
    """Parse Hjson text (JSON is Hjson). The value is what ``hjson.loads(text)`` gives.

    Raises:
        ConfigError: a syntax problem, every duplicate key, or text beyond the bounds.
    """
    _refuse_odd_text(text, name)
    return _Reader(text, name).read()


def _refuse_odd_text(text: str, name: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        reason, fix = "half of a UTF-16 pair is no text", "save the text as UTF-8"
        raise ConfigError.of(kind="config-not-text", file=name, reason=reason, fix=fix) from None
    if num_bytes > MAX_BYTES:
        raise ConfigError.of(
            kind="config-too-large",
            file=name,
            reason=f"more than {MAX_BYTES:,} bytes",
            fix="a DeepSpeed config is a few kilobytes of text",
        )
    if "\0" in text:
        raise ConfigError.of(kind="config-not-text", file=name, reason="it holds zero bytes", fix="name a text file")


class _Reader:
    """Walks the text once, counting what it builds; nesting is bounded, so it may recurse."""

    def __init__(self, text: str, name: str) -> None:
        self.scanner = Scanner(text)
        self.document = HjsonDocument(name, text=text)
        self.problems: list[Problem] = []
        self.num_values = 0
        self.has_member = False
        self.misleading: int | None = None  # the last text without quotes that holds what looks like Hjson

    def read(self) -> HjsonDocument:
        try:
            self.document.value = self._root()
        except ScanError as error:
            self._stop(self._problem("config-syntax", error.at, error.reason, error.fix))
        if self.problems:
            raise ConfigError(self.problems)
        return self.document

    def _root(self) -> Any:
        text = self.document.text
        begin = self.scanner.skip(len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0)
        self.document.places[()] = self.scanner.place(begin)
        if begin == len(text):
            if text.startswith(BYTE_ORDER_MARK):  # the hjson package refuses this one
                raise ScanError(begin, "the file is empty", "write at least {}")
            self.document.spans[()] = Span(None, (begin, begin))
            return {}
        if text[begin] in _CLOSING:
            value, end = self._value(begin, ())
        else:
            value, end = self._without_braces(begin)
        self.document.spans[()] = Span(None, (begin, end))
        self._refuse_rest(end)
        return value

    def _refuse_rest(self, end: int) -> None:
        rest = self.scanner.skip(end)
        if rest < len(self.document.text):
            raise ScanError(rest, "text after the end of the document", "remove it, or check the brackets before it")

    def _without_braces(self, begin: int) -> tuple[Any, int]:
        """The members of the root, or a single value."""
        try:
            return self._members(begin, (), braces=False)
        except ScanError as error:
            if self.has_member:  # the hjson package would take `a: {b: [}` for one text
                raise
            try:
                value, end = self._value(begin, ())
                self._refuse_rest(end)
            except ScanError:
                raise error from None
            return value, end

    def _value(self, at: int, path: KeyPath) -> tuple[Any, int]:
        text = self.document.text
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            reason = f"more than {MAX_VALUES:,} values"
            self._stop(self._problem("config-too-large", at, reason, "make it smaller"))
        line, column = self.scanner.place(at)
        if len(path) > MAX_DEPTH:
            self._stop(replace(too_deep(self.document.name, line), column=column))
        if text.startswith("{", at):
            return self._members(at + 1, path, braces=True)
        if text.startswith("[", at):
            return self._elements(at + 1, path)
        value, end = self.scanner.scalar(at)
        if isinstance(value, str) and text[at] not in "\"'" and any(mark in value for mark in _MISLEADING):
            self.misleading = at
        return value, end

    def _members(self, at: int, path: KeyPath, *, braces: bool) -> tuple[dict[str, Any], int]:
        text, opening = self.document.text, at - 1
        values: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        at = self.scanner.skip(at)
        while True:
            if braces and text.startswith("}", at):
                return values, at + 1
            if at == len(text):
                if braces:
                    self._refuse_open(opening)
                return values, at
            key_at = at
            key, key_end = self.scanner.key(at)
            value_at = self._past_colon(key_end)
            if len(key) > MAX_KEY:
                reason = f"a key of {len(key):,} characters"
                raise ScanError(key_at, reason, "check the quotes and the colons before it")
            here = (*path, key)
            line, column = self.scanner.place(key_at)
            if key not in values:
                self.document.places[here] = (line, column)
            value, end = self._value_at(value_at, here)
            at, comma = self._past_comma(end)
            if key in values:
                self._add_duplicate(here, key_at, first_lines[key])
                continue
            values[key], first_lines[key] = value, line
            self.document.spans[here] = Span((key_at, key_end), (value_at, end), comma)

    def _elements(self, at: int, path: KeyPath) -> tuple[list[Any], int]:
        text, opening = self.document.text, at - 1
        values: list[Any] = []
        at = self.scanner.skip(at)
        while True:
            if text.startswith("]", at):
                return values, at + 1
            if at == len(text):
                self._refuse_open(opening)
            here = (*path, len(values))
            self.document.places[here] = self.scanner.place(at)
            begin = at
            value, end = self._value(begin, here)
            at, comma = self._past_comma(end)
            values.append(value)
            self.document.spans[here] = Span(None, (begin, end), comma)

    def _past_colon(self, key_end: int) -> int:
        at = self.scanner.skip(key_end)
        if not self.document.text.startswith(":", at):
            raise ScanError(at, "no colon after the key", "write key: value, or check the quotes")
        self.has_member = True
        return self.scanner.skip(at + 1)

    def _value_at(self, at: int, path: KeyPath) -> tuple[Any, int]:
        if at == len(self.document.text):
            raise ScanError(at, "the file ends where a value belongs", "write the value")
        return self._value(at, path)

    def _past_comma(self, end: int) -> tuple[int, int | None]:
        at = self.scanner.skip(end)
        return (self.scanner.skip(at + 1), at) if self.document.text.startswith(",", at) else (at, None)

    def _refuse_open(self, opening: int) -> NoReturn:
        bracket = self.document.text[opening]
        reason, fix = f"the {bracket} that opens here is never closed", f"add the {_CLOSING[bracket]}"
        if self.misleading is not None:
            word = _WORD.match(self.document.text, self.misleading)
            if word is not None and word[0] in _FOREIGN:
                stated = f"{word[0]} is no word of JSON: as text without quotes it runs to the end of its line"
                raise ScanError(self.misleading, stated, f"write {_FOREIGN[word[0]]}")
            line = self.scanner.place(self.misleading)[0]
            fix += f", or put the text of line {line} in quotes: without them it runs to the end of its line"
        raise ScanError(opening, reason, fix)

    def _add_duplicate(self, path: KeyPath, at: int, first_line: int) -> None:
        problem = self._problem(
            "duplicate-key", at, f"the key is already set in line {first_line}", "keep one of the two"
        )
        self.problems.append(replace(problem, key=".".join(map(str, path))))
        if len(self.problems) >= MAX_DUPLICATES:
            raise ConfigError(self.problems)

    def _problem(self, kind: str, at: int, reason: str, fix: str) -> Problem:
        line, column = self.scanner.place(at)
        return Problem(kind=kind, file=self.document.name, line=line, column=column, reason=reason, fix=fix)

    def _stop(self, problem: Problem) -> NoReturn:
        raise ConfigError([*self.problems, problem])
