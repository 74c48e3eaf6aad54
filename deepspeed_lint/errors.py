"""`Problem`: one thing that is wrong with a file, as one line for people and as JSON for tools; and
the errors that hold problems, with the exit code that each one ends the process with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from math import isfinite
from typing import Any, Final, Literal, TextIO

EXIT_OK: Final = 0
EXIT_PROBLEMS: Final = 2
EXIT_USAGE: Final = 64
EXIT_FAILURE: Final = 70
EXIT_CONFIG: Final = 78

Severity = Literal["error", "warning", "note"]
_LONGEST_VALUE: Final = 80
_LARGEST_SHOWN: Final = 10**80
_DEEPEST_SHOWN: Final = 2
# Text that YAML would read as a number, a truth value or nothing, and text with blanks at an end,
# which a reader would not see.
_NUMBER: Final = r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?"
_OTHER_SCALAR: Final = r"(?i:true|false|null|~|[-+]?\.(inf|nan))"
_NEEDS_QUOTES: Final = re.compile(rf"|{_NUMBER}|{_OTHER_SCALAR}|\s.*|.*\s", re.DOTALL)
_BREAKS_FLOW: Final = re.compile(r"[,\[\]{}]|: ")
_KEYS: Final = r"(^|_)(api|access|private|secret|auth)_?(key|token)"
_PASSWORDS: Final = r"(^|_)(secret|password|passwd|passphrase|credentials?)"
_TOKENS: Final = r"^(hf_|hub_|push_to_hub_)?token"
_SECRET: Final = re.compile(f"({_KEYS}|{_PASSWORDS}|{_TOKENS})$", re.IGNORECASE)


class _Missing:
    """The value of a key that was left out (None is a value that YAML can write)."""

    def __repr__(self) -> str:
        return "<left out>"

    def __reduce__(self) -> str:
        return "MISSING"  # the same object after an error was sent between ranks


MISSING: Final = _Missing()


class Written(str):
    """A number as its document has it, such as ``007`` or ``1e3``; it is shown like that, without
    the quotes of text.
    """


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a run description.

    Attributes:
        kind: stable name for tools, for example ``batch-not-divisible``.
        reason: why it cannot work.
        fix: what to write instead.
        key: dotted path in the file, for example ``zero.stage``; empty if no single key is
            at fault.
        value: of the key; `MISSING` if it has none.
        file: the file that holds the value, or ``command line``; empty if it came from Python.
        line: 1-based line in `file`, 0 when unknown.
        column: 1-based column in `file`, 0 when unknown.
        severity: only an ``error`` stops a run.
    """

    kind: str
    reason: str
    fix: str = ""
    key: str = ""
    value: Any = MISSING
    file: str = ""
    line: int = 0
    column: int = 0
    severity: Severity = "error"

    def __str__(self) -> str:
        sentence = "; ".join(part for part in (self.reason, self.fix) if part)
        line = ": ".join(part for part in (self._place(), self._subject(), sentence) if part)
        return f"{printable(line)} [{self.kind}]"

    def _place(self) -> str:
        if self.file and self.line:
            return f"{self.file}:{self.line}"
        return self.file

    def _subject(self) -> str:
        if not self.key or self.value is MISSING:
            return self.key
        return f"{self.key} = {show_value(masked(self.key, self.value))}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the attributes, `value` only if there is one, and the line
        as ``text``.
        """
        names = ("kind", "severity", "file", "line", "column", "key", "reason", "fix")
        attributes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.value is not MISSING:
            value = masked(self.key, self.value)
            if value is None or isinstance(value, (str, int)) or _is_finite(value):
                attributes["value"] = value
            else:
                attributes["value"] = show_value(value)
        attributes["text"] = str(self)
        return attributes

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Problem:
        """Build a problem from the result of `to_dict` in another process; unknown keys are
        skipped.
        """
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def show_value(value: Any) -> str:
    """Return a value as YAML, on one line of at most 80 characters; text that would read as a
    number is in quotes.
    """
    text = printable(_yaml(value, depth=0))
    if len(text) <= _LONGEST_VALUE:
        return text
    return text[: _LONGEST_VALUE - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``2 steps``."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def _yaml(value: Any, *, depth: int) -> str:
    """Return a value in flow style, of bounded length and depth: a value may be a megabyte, or hold
    itself.
    """
    if isinstance(value, Written):
        return value[: _LONGEST_VALUE + 1]
    if isinstance(value, str):
        return _yaml_text(value[: _LONGEST_VALUE + 1], is_nested=depth > 0)
    if isinstance(value, (Mapping, list, tuple)):
        if depth > _DEEPEST_SHOWN:
            return "..."
        return _yaml_container(value, depth=depth)
    return _yaml_scalar(value)


def _yaml_scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= _LARGEST_SHOWN:
        return "a number of more than 80 digits"
    return repr(value)


def _yaml_text(text: str, *, is_nested: bool) -> str:
    if _NEEDS_QUOTES.fullmatch(text) or (is_nested and _BREAKS_FLOW.search(text)):
        return f'"{text}"'
    return text


def _yaml_container(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...], *, depth: int) -> str:
    inner = depth + 1
    if isinstance(value, Mapping):
        members = []
        for key, item in islice(value.items(), _LONGEST_VALUE):
            text = _yaml(masked(key, item), depth=inner)
            members.append(f"{_yaml(key, depth=inner)}: {text}")
        return f"{{{', '.join(members)}}}"
    items = [_yaml(item, depth=inner) for item in islice(value, _LONGEST_VALUE)]
    return f"[{', '.join(items)}]"


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value)


def printable(text: str) -> str:
    """Make all control characters visible, line ends as well: no value may control a terminal."""
    return visible(text, keeps="")


def masked(key: object, value: Any) -> Any:
    """Return the value of a key such as ``comet.api_key`` for a log, and asterisks for a secret."""
    if value and _SECRET.search(str(key).rpartition(".")[2]):
        return "***"
    return value


def visible(text: str, *, keeps: str = "\n\t") -> str:
    """Return a text of unknown origin with escapes such as ``\\x1b`` for unprintable characters.

    These could control a terminal or a page: control characters, marks that change the direction of
    reading, separators of lines, and bytes that are not text. The characters of `keeps` stay.
    """
    if text.isascii() and text.isprintable():
        return text
    characters = []
    for character in text:
        if character.isprintable() or character in keeps:
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(characters)


class FrameworkError(Exception):
    """Base of all errors for a user: the text is complete, and no traceback is needed.

    Attributes:
        exit_code: of the process.
        is_of_one_rank: other ranks do not meet the error, so that this one has to report it;
            otherwise one rank reports it for all.
    """

    exit_code: int = EXIT_FAILURE

    def __init__(self, *text: object, is_of_one_rank: bool = False) -> None:
        super().__init__(*text)
        self.is_of_one_rank = is_of_one_rank

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(FrameworkError):
    """The command line is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(FrameworkError):
    """The run cannot work as described. `problems` has all problems, not only the first one."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: Problem | Iterable[Problem] | str) -> None:
        """Make the error of problems, or of their lines alone: torch makes the error of a data
        worker again from its text.
        """
        if isinstance(problems, str):
            self.problems: Sequence[Problem] = ()
            super().__init__(problems)
            return
        if isinstance(problems, Problem):
            self.problems = (problems,)
        else:
            self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def of(
        cls,
        kind: str,
        reason: str,
        fix: str = "",
        key: str = "",
        value: Any = MISSING,
        file: str = "",
        line: int = 0,
        column: int = 0,
    ) -> ConfigError:
        """Make the error of one problem; the arguments are `Problem`'s."""
        return cls(Problem(kind, reason, fix, key, value, file, line, column))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...] | str]]:
        return type(self), (tuple(self.problems) or str(self),)


_RED: Final = "\x1b[1;31m"
_YELLOW: Final = "\x1b[1;33m"
_CYAN: Final = "\x1b[36m"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_NARROWEST: Final = 40
_INDENT: Final = "    "
# A problem as one line: its severity unless it is an error, its place or key, the text, its kind.
_PROBLEM: Final = re.compile(
    r"((?:warning|note): )?(.*?: )?(.*?)( \[[a-z][a-z0-9]*(?:-[a-z0-9]+)+\])?"
)


def painted_for(stream: TextIO, text: str) -> str:
    """Return a text as a stream gets it: on a terminal, lines that state a problem are folded to
    its width; if the stream gets colours, they are coloured.
    """
    width = None
    if is_terminal(stream):
        from shutil import get_terminal_size

        width = max(get_terminal_size().columns, _NARROWEST)
    colours = is_coloured(stream)
    if width is None and not colours:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(painted(line, width=width, colours=colours) for line in lines)


def is_coloured(stream: TextIO) -> bool:
    """Check whether a stream gets colours: a terminal does. The environment may decide otherwise:
    NO_COLOR (no-color.org) and FORCE_COLOR (force-color.org), the first of them if both are set.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return os.environ["FORCE_COLOR"] != "0"
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_terminal(stream: TextIO | None) -> bool:
    """Check whether a stream is a terminal; a stand-in of the user's may have no such method."""
    isatty = getattr(stream, "isatty", None)
    return callable(isatty) and bool(isatty())


def painted(line: str, *, width: int | None = None, colours: bool = True) -> str:
    """Return a line that states a problem in colours, and any other line as it is: an error is red
    where it begins, a warning yellow, a note cyan; the kind is dim.

    `width`: columns to fold it to; later lines of it are indented.
    """
    body = line.rstrip("\n")
    line_end = line[len(body) :]
    match = _PROBLEM.fullmatch(body)
    if match is None:
        return line
    severity, place, text, kind = match.groups()
    if not severity and not kind:
        return line
    head = f"{severity or ''}{place or ''}"
    tail = kind or ""
    if width is not None and len(body) > width:
        body = "\n".join(_folded(body, width))
        head = head.rstrip() if body.startswith(head.rstrip()) else ""
        tail = tail.strip()
        text = body[len(head) : len(body) - len(tail)]
    if not colours:
        return f"{head}{text}{tail}{line_end}"
    colour = {"warning: ": _YELLOW, "note: ": _CYAN}.get(severity or "", _RED)
    if head:
        head = f"{colour}{head}{_PLAIN}"
    if tail:
        tail = f"{_DIM}{tail}{_PLAIN}"
    return f"{head}{text}{tail}{line_end}"


def _folded(line: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(
        line,
        width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
