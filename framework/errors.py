"""Every error a user can meet, and the exit code each one ends the process with.

    FrameworkError                 exit code
    |- UsageError                  64   the command line itself is wrong
    |- ConfigError                 78   the run as described cannot work: holds every Problem found
    |- TrainingError               70   training started and failed
    |  `- PeerLostError            76   another rank or node has ended or cannot be reached
    |- StorageError                74   the run folder or a checkpoint cannot be read or written
    `- RunStopped                  75   somebody asked the run to stop, and it did so in good order

A `Problem` is one line: place, key, value, reason, fix, and a stable kind in brackets. Exit codes
follow sysexits(3) where a number exists there, so that a job scheduler can tell "never retry" (64,
78) from "may work next time".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from math import isfinite
from typing import Any, Final, Literal

from framework.system.output import masked, visible

EXIT_OK: Final = 0
EXIT_PROBLEMS: Final = 2
EXIT_USAGE: Final = 64
EXIT_TRAINING: Final = 70
EXIT_STORAGE: Final = 74
EXIT_STOPPED: Final = 75
EXIT_PEER_LOST: Final = 76
EXIT_NO_PROGRESS: Final = 77
EXIT_CONFIG: Final = 78

Severity = Literal["error", "warning", "note"]
_LONGEST_VALUE: Final = 80
_LARGEST_SHOWN: Final = 10**80
_DEEPEST_SHOWN: Final = 2
# Text that YAML would read as a number, a truth value or nothing, and text that ends where nobody
# sees it.
_NEEDS_QUOTES: Final = re.compile(
    r"|[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|(?i:true|false|null|~|[-+]?\.(inf|nan))|\s.*|.*\s",
    re.DOTALL,
)
_BREAKS_FLOW: Final = re.compile(r"[,\[\]{}]|: ")


class _Missing:
    """The value of a key that was left out (None is a value that YAML can write)."""

    def __repr__(self) -> str:
        return "<left out>"

    def __reduce__(self) -> str:
        return "MISSING"  # stays the one object when an error travels between ranks


MISSING: Final = _Missing()


class Written(str):
    """A number as its document writes it, such as ``007`` or ``1e3``; shown like that, without the
    quotes of text.
    """


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a run description.

    Attributes:
        kind: stable name for tools, for example ``batch-not-divisible``.
        reason: why it cannot work.
        fix: what to write instead.
        key: dotted path in the run config, for example ``zero.stage``; empty when no single key is
            at fault.
        value: what was found there; `MISSING` when nothing was.
        file: the file that holds the value, or ``command line``; empty when it came from Python.
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
        if self.file and self.line:
            place = f"{self.file}:{self.line}"
        else:
            place = self.file
        subject = self.key
        if self.key and self.value is not MISSING:
            subject += f" = {show_value(masked(self.key, self.value))}"
        if self.fix:
            sentence = f"{self.reason}; {self.fix}"
        else:
            sentence = self.reason
        return (
            printable(": ".join(part for part in (place, subject, sentence) if part))
            + f" [{self.kind}]"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the attributes, `value` only where there is one, and the line
        itself as ``text``.
        """
        names = ("kind", "severity", "file", "line", "column", "key", "reason", "fix")
        shown: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.value is not MISSING:
            value = masked(self.key, self.value)
            is_json = value is None or isinstance(value, (str, int)) or _is_finite(value)
            shown["value"] = value if is_json else show_value(value)
        return shown | {"text": str(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Problem:
        """Build a problem from the result of `to_dict`, made in another process; unknown keys are
        skipped.
        """
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


def show_value(value: Any) -> str:
    """A value as YAML writes it, on one line of at most 80 characters; in quotes where text would
    read as a number.
    """
    text = printable(_yaml(value, depth=0))
    if len(text) <= _LONGEST_VALUE:
        return text
    return text[: _LONGEST_VALUE - 3] + "..."


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _yaml(value: Any, *, depth: int) -> str:
    """Flow style, cut off where nobody would read on: a value may be a megabyte or hold itself."""
    if isinstance(value, Written):
        return value[: _LONGEST_VALUE + 1]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        value = value[: _LONGEST_VALUE + 1]
        return (
            f'"{value}"'
            if _NEEDS_QUOTES.fullmatch(value) or (depth and _BREAKS_FLOW.search(value))
            else value
        )
    if isinstance(value, int) and abs(value) >= _LARGEST_SHOWN:
        return "a number of more than 80 digits"
    if isinstance(value, (Mapping, list, tuple)) and depth > _DEEPEST_SHOWN:
        return "..."
    if isinstance(value, Mapping):
        pairs = islice(value.items(), _LONGEST_VALUE)
        shown = (
            f"{_yaml(key, depth=depth + 1)}: {_yaml(masked(key, item), depth=depth + 1)}"
            for key, item in pairs
        )
        return "{" + ", ".join(shown) + "}"
    if isinstance(value, (list, tuple)):
        return (
            "["
            + ", ".join(_yaml(item, depth=depth + 1) for item in islice(value, _LONGEST_VALUE))
            + "]"
        )
    return repr(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value)


def printable(text: str) -> str:
    """One line whose control characters are visible, so that no value can write to the terminal."""
    return visible(text, keeps="")


def in_one_line(error: BaseException, *, longest: int = 200) -> str:
    """Type and text of an error that somebody else raised; their texts may fill pages."""
    text = " ".join(str(error).split())[:longest]
    if text:
        return f"{type(error).__name__}: {text}"
    return type(error).__name__


class FrameworkError(Exception):
    """Base of all errors meant for a user: its text is complete, no traceback is needed to
    understand it.

    Attributes:
        exit_code: what the process ends with.
        is_of_one_rank: other ranks do not meet it, so this one must tell it. Otherwise one rank
            speaks for all.
    """

    exit_code: int = EXIT_TRAINING

    def __init__(self, *text: object, is_of_one_rank: bool = False) -> None:
        super().__init__(*text)
        self.is_of_one_rank = is_of_one_rank

    def _render_traceback_(self) -> list[str]:
        """In a notebook IPython shows this in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(FrameworkError):
    """The command line is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(FrameworkError):
    """The run cannot work as described. `problems` holds everything found, not only the first."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: Problem | Iterable[Problem] | str) -> None:
        """From a text it has no problems, only their lines: so torch makes the error of a worker
        anew.
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
        """Make the error of one problem; the arguments are those of `Problem`."""
        return cls(Problem(kind, reason, fix, key, value, file, line, column))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...] | str]]:
        return type(self), (tuple(self.problems) or str(self),)


def missing_package(name: str, *, what: str, extra: str = "train") -> ConfigError:
    """A package that `what` takes is not installed: the command line is right, and trying again
    does not help.
    """
    reason = f"{what} needs the package {name}, which {sys.executable} does not have"
    fix = f"in the checkout: ./launch.sh setup {extra}, or pip install -e '.[{extra}]'"
    return ConfigError.of(kind="package-missing", reason=reason, fix=fix)


@contextmanager
def explaining(*explanations: Callable[[Exception], FrameworkError | None]) -> Iterator[None]:
    """Raise what the first of the functions makes of an error, with that error as its cause; other
    errors pass.
    """
    try:
        yield
    except Exception as error:
        for explain in explanations:
            explained = explain(error)
            if explained is not None:
                raise explained from error
        raise


class TrainingError(FrameworkError):
    """Training started and could not go on."""

    exit_code = EXIT_TRAINING


class StorageError(FrameworkError):
    """A run folder or a checkpoint cannot be read or written."""

    exit_code = EXIT_STORAGE


class PeerLostError(TrainingError):
    """Another rank or node has ended or cannot be reached; what that one said last tells why."""

    exit_code = EXIT_PEER_LOST


class RunStopped(FrameworkError):  # noqa: N818 - it is no error
    """The run was asked to stop, and stopped in good order. Not a failure, and never an end like
    any other: exit code 75.
    """

    exit_code = EXIT_STOPPED
