"""The words of Hjson: comments, keys, strings and numbers, read as the `hjson` package reads them for DeepSpeed.

Its rules, some of them surprising, are kept: text without quotes runs to the end of its line, with commas and comments
in it; `1e3` and `1.0` are integers; `NaN` is text. What is refused beyond them has no meaning in a config.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from math import isinf
from typing import Any, Final, NoReturn

from framework.errors import show_value

BYTE_ORDER_MARK: Final = "\ufeff"
MAX_DIGITS: Final = 4_300  # Python reads no longer integer; a longer float is no setting either
_BLANKS: Final = " \t\r\n"
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_LINE: Final = re.compile(r"[^\r\n]*")
_LINE_END: Final = re.compile(r"\r\n|\n|\r")
_WORD: Final = re.compile(r"(null|true|false)[^\S\r\n]*(?=[\r\n,}\]#]|//|/\*|\Z)")
_WORDS: Final = {"null": None, "true": True, "false": False}
_NUMBER: Final = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*")
ENDS_NUMBER: Final = re.compile(r"[\r\n,}\]#]|//|/\*|\Z")
_KEY: Final = re.compile(r"[^:{}\[\],]*")
_CHUNK: Final = re.compile(r"[^'\"\\\x00-\x1f]*")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES: Final = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
# First character where a key belongs -> what to say.
_NO_KEY: Final = {
    ":": ("a colon without a key", "write the key before it (an empty key needs quotes)"),
    ",": ("a comma where a key belongs", "remove it"),
    "": ("the file ends where a key belongs", "write key: value"),
}


class ScanError(Exception):
    """Error at the place where reading stopped, with the text of its problem."""

    def __init__(self, at: int, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.at, self.reason, self.fix = at, reason, fix


class Scanner:
    """Reads one word at a time from a text; every method takes an offset and returns the offset behind what it read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._line_starts = [0, *(match.end() for match in _LINE_END.finditer(text))]
        self._has_lone_return = bool(re.search(r"\r(?!\n)", text))

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, both 1-based; a byte order mark counts as nothing."""
        line = bisect_right(self._line_starts, at)
        column = at - self._line_starts[line - 1] + 1
        return line, column - (line == 1 and column > 1 and self.text.startswith(BYTE_ORDER_MARK))

    def skip(self, at: int) -> int:
        """Past blanks and comments."""
        text = self.text
        while True:
            match = _SPACE.match(text, at)
            assert match
            at = match.end()
            if text.startswith(("#", "//"), at):
                at = self._end_of_line(at)
            elif text.startswith("/*", at):
                end = text.find("*/", at + 2)
                if end < 0:
                    self._stop(at, "the comment that begins here does not end", "close it with */")
                at = end + 2
            else:
                return at

    def key(self, at: int) -> tuple[str, int]:
        """The name of a key and the end of how it is written."""
        if self.text.startswith(('"', "'"), at):
            return self.quoted(at)
        match = _KEY.match(self.text, at)
        assert match
        written, stop = match[0], self.text[match.end() : match.end() + 1]
        if not written:
            self._stop(at, *_NO_KEY.get(stop, (f"a {stop} where a key belongs", "check the brackets before it")))
        if stop != ":":
            name = written.split(maxsplit=1)[0] if written.strip() else written
            self._stop(at, f"no colon after {show_value(name)}", "write key: value")
        bare = written.rstrip(_BLANKS)
        if any(blank in bare for blank in _BLANKS):
            fix = "add the missing colon or comma, or quote the key"
            self._stop(at, f"the key {show_value(written)} has a blank in it", fix)
        return bare if bare == written else written.rstrip(), at + len(bare)

    def scalar(self, at: int) -> tuple[Any, int]:
        """A value that is no object and no list."""
        text = self.text
        first = text[at]
        if text.startswith("'''", at):
            return self._many_lines(at)
        if first in "\"'":
            return self.quoted(at)
        if first in "}],:":
            self._stop(at, f"a {first} where a value belongs", "write the value, or remove what asks for one")
        if first in "ntf" and (word := _WORD.match(text, at)):
            return _WORDS[word[1]], at + len(word[0].rstrip(" \t"))
        if (first == "-" or "0" <= first <= "9") and (number := _NUMBER.match(text, at)):  # noqa: SIM102
            if ENDS_NUMBER.match(text, number.end()):
                return self._number(number), at + len(number[0].rstrip(" \t"))
        written = text[at : self._end_of_line(at)]
        return written.strip(), at + len(written.rstrip(" \t"))

    def _number(self, match: re.Match[str]) -> int | float:
        written = match[0].rstrip(" \t")
        if len(written) > MAX_DIGITS:
            self._stop(match.start(), f"a number of {len(written):,} characters", "write a shorter one")
        whole, fraction, exponent = match.groups(default="")
        if not fraction and not exponent:
            return int(whole)
        number = float(whole + fraction + exponent)
        if isinf(number):
            self._stop(match.start(), "too large for a number", "write a smaller one")
        return int(number) if number.is_integer() and abs(number) < 1e10 else number

    def quoted(self, at: int) -> tuple[str, int]:
        """Text in single or double quotes."""
        text, quote, begin = self.text, self.text[at], at
        parts: list[str] = []
        at += 1
        while True:
            match = _CHUNK.match(text, at)
            assert match
            parts.append(match[0])
            at = match.end()
            mark = text[at : at + 1]
            if mark == quote:
                return "".join(parts), at + 1
            if mark == "\\":
                part, at = self._escape(at)
            elif mark and mark in "\"'":
                part, at = mark, at + 1
            elif mark in ("", "\r", "\n"):
                self._stop(begin, "the quotes that begin here do not end on their line", f"add the closing {quote}")
            else:
                self._stop(at, "a tab or control character inside quotes", "write it as an escape, for example \\t")
            parts.append(part)

    def _escape(self, at: int) -> tuple[str, int]:
        letter = self.text[at + 1 : at + 2]
        if letter in _ESCAPES:
            return _ESCAPES[letter], at + 2
        if letter != "u":
            self._stop(at, f"\\{letter} is no escape", "write \\\\ for a backslash")
        code = self._code(at)
        if 0xD800 <= code < 0xDC00 and self.text.startswith("\\u", at + 6):
            second = self._code(at + 6)
            if 0xDC00 <= second < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10 | (second - 0xDC00))), at + 12
        if 0xD800 <= code < 0xE000:
            self._stop(at, "half of a UTF-16 pair is no text", "write the character itself")
        return chr(code), at + 6

    def _code(self, at: int) -> int:
        match = _HEX.match(self.text, at + 2)
        if not match:
            self._stop(at, "\\u without four hexadecimal digits", "write for example \\u00e9")
        return int(match[0], 16)

    def _many_lines(self, at: int) -> tuple[str, int]:
        """Text between three single quotes; its lines lose as many blanks as stand left of the opening quotes."""
        text = self.text
        end = text.find("'''", at + 3)
        if end < 0:
            self._stop(at, "the ''' that begins here does not end", "close it with '''")
        if self._has_lone_return:
            self._stop(at, "a ''' text in a file with carriage returns alone", "save the file with other line ends")
        body = text[at + 3 : end].replace("\r\n", "\n").lstrip(" \t")
        first, *rest = body.split("\n")
        indent = self._indent_of(at)
        lines = [first, *(line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in rest)]
        if not first and rest:
            del lines[0]
        return "\n".join(lines).removesuffix("\n"), end + 3

    def _indent_of(self, at: int) -> int:
        """Characters left of an offset; in the first line the hjson package goes on counting from the end of the
        text.
        """
        line = bisect_right(self._line_starts, at)
        if line > 1:
            return at - self._line_starts[line - 1]
        if len(self._line_starts) == 1:
            self._stop(at, "DeepSpeed cannot read ''' in a file of one line", "use double quotes")
        return at + len(self.text) - self._line_starts[-1]

    def _end_of_line(self, at: int) -> int:
        match = _LINE.match(self.text, at)
        assert match
        return match.end()

    def _stop(self, at: int, reason: str, fix: str) -> NoReturn:
        raise ScanError(at, reason, fix)
