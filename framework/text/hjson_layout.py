"""How a Hjson text is laid out: what stands on which line, how far it is indented, what separates it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from framework.text.document import KeyPath, at
from framework.text.hjson import HjsonDocument
from framework.text.hjson_scan import BYTE_ORDER_MARK, ENDS_NUMBER

BLANKS: Final = re.compile(r"[ \t]*")
REST_OF_LINE: Final = re.compile(r"(?:[ \t]|/\*(?:[^*\r\n]|\*(?!/))*\*/)*(?:(?:#|//)[^\r\n]*)?(?=[\r\n]|\Z)")
LINE_END: Final = re.compile(r"\r\n|\n|\r")
_DEFAULT_INDENT: Final = "    "


def match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a match at an offset ends; -1 without one."""
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
        """Whether the value is text without quotes, which goes to the end of its line."""
        return isinstance(self.value_at(path), str) and self.text[self.spans[path].value[0]] not in "\"'"

    def has_braces(self, path: KeyPath) -> bool:
        """Whether the value is an object with braces: the root may do without."""
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
        """What separates members on lines of their own: nothing where several stand without commas."""
        is_bare = len(members) > 1 and all(self.spans[path].comma is None for path in members)
        return "" if is_bare and self.own_indent(members[-1]) is not None else ","

    def ends_number(self, at: int) -> bool:
        """Whether a number may stand before an offset: what follows on the line would otherwise make it text."""
        return bool(ENDS_NUMBER.match(self.text, match_end(BLANKS, self.text, at)))
