"""Reads DeepSpeed JSON as DeepSpeed does, which is Hjson, together with the place and the extent of
everything.

DeepSpeed reads its file with the `hjson` package: comments, commas too many or left out, text
without quotes that runs to the end of its line, with commas and comments in it; `1e3` and `1.0` are
integers, `NaN` is text. That package gives no positions and reads without bound; here every problem
has a line, every edit finds its characters, and a hostile file costs a bounded amount of time. What
is refused beyond its rules has no meaning in a config.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from math import isinf
from pathlib import Path
from typing import Any, Final, NoReturn

from deepspeed_lint.errors import ConfigError, show_value
from deepspeed_lint.text.document import (
    BYTE_ORDER_MARK,
    MAX_BYTES,
    Builder,
    Document,
    KeyPath,
    Span,
    read_text,
)

MAX_KEY: Final = 1_024  # as in YAML
MAX_DIGITS: Final = 4_300  # Python reads no longer integer; a longer float is no setting either
ENDS_NUMBER: Final = re.compile(r"[\r\n,}\]#]|//|/\*|\Z")
_BLANKS: Final = " \t\r\n"
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_LINE: Final = re.compile(r"[^\r\n]*")
_LINE_END: Final = re.compile(r"\r\n|\n|\r")
_WORD: Final = re.compile(rf"(null|true|false)[^\S\r\n]*(?={ENDS_NUMBER.pattern})")
_WORDS: Final = {"null": None, "true": True, "false": False}
_NUMBER: Final = re.compile(
    rf"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*(?={ENDS_NUMBER.pattern})"
)
_KEY: Final = re.compile(r"[^:{}\[\],]*")
_CHUNK: Final = re.compile(r"[^'\"\\\x00-\x1f]*")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES: Final = {
    '"': '"',
    "'": "'",
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
# First character where a key belongs -> reason and fix.
_NO_KEY: Final = {
    ":": ("a colon without a key", "write the key before it (an empty key needs quotes)"),
    ",": ("a comma where a key belongs", "remove it"),
    "": ("the file ends where a key belongs", "write key: value"),
}
# Words of Python and JavaScript, each with what JSON has for it.
_FOREIGN: Final[Mapping[str, str]] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "undefined": "null",
    **dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "a finite number"),
}
_FIRST_WORD: Final = re.compile(r"-?\w*")
_MISLEADING: Final = (",", "}", "]", '"', " #", "//", "/*")


def read_hjson(path: Path, *, name: str) -> Document:
    """Read a DeepSpeed JSON file; `text` of the result encodes to its bytes. Errors: `read_text`'s,
    `parse_hjson`'s.
    """
    return parse_hjson(read_text(path, name=name), name=name)


def parse_hjson(text: str, *, name: str) -> Document:
    """Parse Hjson text (JSON is Hjson). The value is what ``hjson.loads(text)`` gives.

    Raises:
        ConfigError: a syntax problem, every duplicate key, or text beyond the bounds.
    """
    return _Reader(name, text, "hjson").read()


class _Reader(Builder):
    """Walks the text once; methods take an offset, and return what they read and the offset after
    it.

    Nesting is bounded, so they may recurse.
    """

    def read(self) -> Document:
        """Return the document; raises ConfigError at a syntax problem, or with all duplicates."""
        self.text = self.document.text
        self._line_starts = [0] + [match.end() for match in _LINE_END.finditer(self.text)]
        self._has_lone_return = bool(re.search(r"\r(?!\n)", self.text))
        self._has_member = False
        # the last text without quotes that holds what looks like Hjson
        self._misleading: int | None = None
        self._check_text()
        has_mark = self.text.startswith(BYTE_ORDER_MARK)
        begin = self._skip(len(BYTE_ORDER_MARK) if has_mark else 0)
        self.document.places[()] = self._place(begin)
        if begin == len(self.text):
            if has_mark:  # the hjson package refuses this one
                self._refuse(begin, "the file is empty", "write at least {}")
            value: Any = {}
            end = begin
        elif self.text[begin] in "{[":
            value, end = self._value(begin, ())
            self._refuse_rest(end)
        else:
            value, end = self._without_braces(begin)
            self._refuse_rest(end)
        self.document.value = value
        self.document.spans[()] = Span(None, (begin, end))
        if self.problems:
            raise ConfigError(self.problems)
        return self.document

    def _check_text(self) -> None:
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            self.stop(
                "config-not-text",
                (0, 0),
                "half of a UTF-16 pair is no text",
                "save the text as UTF-8",
            )
        if num_bytes > MAX_BYTES:
            reason = f"more than {MAX_BYTES:,} bytes"
            fix = "a DeepSpeed config is a few kilobytes of text"
            self.stop("config-too-large", (0, 0), reason, fix)
        if "\0" in self.text:
            self.stop("config-not-text", (0, 0), "it holds zero bytes", "name a text file")

    def _place(self, at: int) -> tuple[int, int]:
        """Return line and column, both 1-based; a byte order mark counts as nothing."""
        line = bisect_right(self._line_starts, at)
        column = at - self._line_starts[line - 1] + 1
        if line == 1 and column > 1 and self.text.startswith(BYTE_ORDER_MARK):
            column -= 1
        return line, column

    def _refuse(self, at: int, reason: str, fix: str) -> NoReturn:
        self.stop("config-syntax", self._place(at), reason, fix)

    def _refuse_rest(self, end: int) -> None:
        rest = self._skip(end)
        if rest < len(self.text):
            self._refuse(
                rest,
                "text after the end of the document",
                "remove it, or check the brackets before it",
            )

    def _without_braces(self, begin: int) -> tuple[Any, int]:
        """Read a document of members without braces around them, or of a single value."""
        try:
            return self._members(begin, (), closing="")
        except ConfigError as error:
            if self._has_member:  # the hjson package would take `a: {b: [}` for one text
                raise
            try:
                value, end = self._value(begin, ())
                self._refuse_rest(end)
            except ConfigError:
                raise error from None
            return value, end

    # ---- values

    def _value(self, at: int, path: KeyPath) -> tuple[Any, int]:
        self.count(len(path), self._place(at))
        if self.text.startswith("{", at):
            return self._members(at + 1, path, closing="}")
        if self.text.startswith("[", at):
            return self._elements(at + 1, path)
        value, end = self._scalar(at)
        if isinstance(value, str) and self._looks_like_hjson(value, at):
            self._misleading = at
        return value, end

    def _looks_like_hjson(self, value: str, at: int) -> bool:
        """Check whether a text without quotes holds what looks like the next member."""
        return self.text[at] not in "\"'" and any(mark in value for mark in _MISLEADING)

    def _members(self, at: int, path: KeyPath, *, closing: str) -> tuple[dict[str, Any], int]:
        """Read members up to a closing brace, or with an empty `closing` to the end of the text."""
        values: dict[str, Any] = {}
        begin = at
        at = self._skip(at)
        while at < len(self.text):
            if closing and self.text.startswith(closing, at):
                return values, at + 1
            at = self._member(at, path, values)
        if closing:
            self._refuse_open(begin - 1, closing)
        return values, at

    def _member(self, at: int, path: KeyPath, values: dict[str, Any]) -> int:
        """Read one member into the values; return the offset of the next one."""
        key_at = at
        key, key_end = self._key(at)
        at = self._skip(key_end)
        if not self.text.startswith(":", at):
            self._refuse(at, "no colon after the key", "write key: value, or check the quotes")
        self._has_member = True
        value_at = self._skip(at + 1)
        if len(key) > MAX_KEY:
            self._refuse(
                key_at,
                f"a key of {len(key):,} characters",
                "check the quotes and the colons before it",
            )
        here = (*path, key)
        place = self._place(key_at)
        if key not in values:
            self.document.places[here] = place
        if value_at == len(self.text):
            self._refuse(value_at, "the file ends where a value belongs", "write the value")
        value, end = self._value(value_at, here)
        next_at, comma = self._past_comma(end)
        if key in values:
            self.add_duplicate(here, place)
        else:
            values[key] = value
            self.document.spans[here] = Span((key_at, key_end), (value_at, end), comma)
        return next_at

    def _elements(self, at: int, path: KeyPath) -> tuple[list[Any], int]:
        values: list[Any] = []
        begin = at
        at = self._skip(at)
        while not self.text.startswith("]", at):
            if at == len(self.text):
                self._refuse_open(begin - 1, "]")
            here = (*path, len(values))
            value_at = at
            self.document.places[here] = self._place(at)
            value, end = self._value(at, here)
            at, comma = self._past_comma(end)
            values.append(value)
            self.document.spans[here] = Span(None, (value_at, end), comma)
        return values, at + 1

    def _past_comma(self, end: int) -> tuple[int, int | None]:
        """Return the offset of what follows, and the offset of the comma before it, or None."""
        at = self._skip(end)
        if self.text.startswith(",", at):
            return self._skip(at + 1), at
        return at, None

    def _refuse_open(self, opening: int, closing: str) -> NoReturn:
        reason = f"the {self.text[opening]} that opens here is never closed"
        fix = f"add the {closing}"
        if self._misleading is not None:
            word = _match(_FIRST_WORD, self.text, self._misleading)[0]
            if word in _FOREIGN:
                reason = (
                    f"{word} is no word of JSON: as text without quotes it runs to the end "
                    "of its line"
                )
                self._refuse(self._misleading, reason, f"write {_FOREIGN[word]}")
            line = self._place(self._misleading)[0]
            fix += (
                f", or put the text of line {line} in quotes: without them it runs to the end "
                "of its line"
            )
        self._refuse(opening, reason, fix)

    # ---- words

    def _skip(self, at: int) -> int:
        """Return the offset after blanks and comments."""
        text = self.text
        while True:
            at = _match(_SPACE, text, at).end()
            if text.startswith(("#", "//"), at):
                at = _match(_LINE, text, at).end()
            elif text.startswith("/*", at):
                end = text.find("*/", at + 2)
                if end < 0:
                    self._refuse(
                        at, "the comment that begins here does not end", "close it with */"
                    )
                at = end + 2
            else:
                return at

    def _key(self, at: int) -> tuple[str, int]:
        """Return the name of a key, and the offset after it as it is written."""
        if self.text.startswith(('"', "'"), at):
            return self._quoted(at)
        match = _match(_KEY, self.text, at)
        written = match[0]
        stop = self.text[match.end() : match.end() + 1]
        if not written:
            unexpected = (f"a {stop} where a key belongs", "check the brackets before it")
            reason, fix = _NO_KEY.get(stop, unexpected)
            self._refuse(at, reason, fix)
        if stop != ":":
            words = written.split(maxsplit=1)
            first_word = words[0] if words else written
            self._refuse(at, f"no colon after {show_value(first_word)}", "write key: value")
        bare = written.rstrip(_BLANKS)
        if any(blank in bare for blank in _BLANKS):
            fix = "add the missing colon or comma, or quote the key"
            self._refuse(at, f"the key {show_value(written)} has a blank in it", fix)
        name = bare
        # The hjson package strips Unicode's other blanks too, but only if a plain one follows.
        if bare != written:
            name = written.rstrip()
        return name, at + len(bare)

    def _scalar(self, at: int) -> tuple[Any, int]:
        text = self.text
        if text.startswith("'''", at):
            return self._many_lines(at)
        if text[at] in "\"'":
            return self._quoted(at)
        if text[at] in "}],:":
            self._refuse(
                at,
                f"a {text[at]} where a value belongs",
                "write the value, or remove what asks for one",
            )
        word = _WORD.match(text, at)
        if word:
            return _WORDS[word[1]], at + len(word[0].rstrip(" \t"))
        number = _NUMBER.match(text, at)
        if number:
            return self._number(number), at + len(number[0].rstrip(" \t"))
        written = _match(_LINE, text, at)[0]
        return written.strip(), at + len(written.rstrip(" \t"))

    def _number(self, match: re.Match[str]) -> int | float:
        written = match[0].rstrip(" \t")
        if len(written) > MAX_DIGITS:
            self._refuse(
                match.start(), f"a number of {len(written):,} characters", "write a shorter one"
            )
        is_whole = not match[2] and not match[3]
        if is_whole:
            return int(written)
        number = float(written)
        if isinf(number):
            self._refuse(match.start(), "too large for a number", "write a smaller one")
        return _whole_if_small(number)

    def _quoted(self, begin: int) -> tuple[str, int]:
        text = self.text
        quote = text[begin]
        at = begin + 1
        parts: list[str] = []
        while True:
            match = _match(_CHUNK, text, at)
            parts.append(match[0])
            at = match.end()
            mark = text[at : at + 1]
            if mark == quote:
                return "".join(parts), at + 1
            if mark == "\\":
                part, at = self._escape(at)
                parts.append(part)
            elif mark and mark in "\"'":
                parts.append(mark)
                at += 1
            else:
                self._refuse_in_quotes(begin, at)

    def _refuse_in_quotes(self, begin: int, at: int) -> NoReturn:
        """Refuse what may not stand in the quotes that begin at an offset."""
        if self.text[at : at + 1] in ("", "\r", "\n"):
            reason = "the quotes that begin here do not end on their line"
            self._refuse(begin, reason, f"add the closing {self.text[begin]}")
        reason = "a tab or control character inside quotes"
        self._refuse(at, reason, "write it as an escape, for example \\t")

    def _escape(self, at: int) -> tuple[str, int]:
        letter = self.text[at + 1 : at + 2]
        if letter in _ESCAPES:
            return _ESCAPES[letter], at + 2
        if letter != "u":
            self._refuse(at, f"\\{letter} is no escape", "write \\\\ for a backslash")
        code = self._code(at)
        if 0xD800 <= code < 0xE000:
            return self._pair(code, at), at + 12
        return chr(code), at + 6

    def _pair(self, first: int, at: int) -> str:
        """Return the character of a UTF-16 pair; its first half was read at an offset."""
        second = 0
        if first < 0xDC00 and self.text.startswith("\\u", at + 6):
            second = self._code(at + 6)
        if not 0xDC00 <= second < 0xE000:
            self._refuse(at, "half of a UTF-16 pair is no text", "write the character itself")
        return chr(0x10000 + ((first - 0xD800) << 10 | (second - 0xDC00)))

    def _code(self, at: int) -> int:
        match = _HEX.match(self.text, at + 2)
        if not match:
            self._refuse(at, "\\u without four hexadecimal digits", "write for example \\u00e9")
        return int(match[0], 16)

    def _many_lines(self, at: int) -> tuple[str, int]:
        """Read text between three single quotes; its lines lose as many blanks as stand left of the
        opening quotes.
        """
        end = self.text.find("'''", at + 3)
        if end < 0:
            self._refuse(at, "the ''' that begins here does not end", "close it with '''")
        if self._has_lone_return:
            self._refuse(
                at,
                "a ''' text in a file with carriage returns alone",
                "save the file with other line ends",
            )
        if len(self._line_starts) == 1:
            self._refuse(at, "DeepSpeed cannot read ''' in a file of one line", "use double quotes")
        written = self.text[at + 3 : end].replace("\r\n", "\n").lstrip(" \t").split("\n")
        lines = _outdented(written, self._many_lines_indent(at))
        return "\n".join(lines).removesuffix("\n"), end + 3

    def _many_lines_indent(self, at: int) -> int:
        line = bisect_right(self._line_starts, at)
        indent = at - self._line_starts[line - 1]
        if line == 1:  # there the hjson package counts on from the end of the text
            indent += len(self.text) - self._line_starts[-1]
        return indent


def _outdented(written: list[str], indent: int) -> list[str]:
    """Return lines without the indentation of all but the first, which goes if it is empty."""
    lines = written[:1]
    for line in written[1:]:
        num_blanks = len(line) - len(line.lstrip(" \t"))
        lines.append(line[min(indent, num_blanks) :])
    if len(lines) > 1 and not lines[0]:
        del lines[0]
    return lines


def _whole_if_small(number: float) -> int | float:
    """Return a whole number below 1e10 as int, as the hjson package does."""
    if number.is_integer() and abs(number) < 1e10:
        return int(number)
    return number


def _match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    """Match a pattern that matches everywhere."""
    match = pattern.match(text, at)
    assert match
    return match
