"""The parser of a command line, for every command that reads one of its own."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from framework.errors import UsageError

_T = TypeVar("_T")


class HelpShown(SystemExit):
    """A help text or a release that was asked for has been printed: a good end."""


class CommandParser(argparse.ArgumentParser):
    """argparse with one line for a mistake, and options in both spellings."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError: what is wrong, and where the help is."""
        flag = re.match(r"argument (--\w+).*: expected one argument$", message)
        if flag:  # argparse takes what follows for an option of its own
            message += f" (if it begins with a dash, write {flag[1]}=-...)"
        raise UsageError(f"{self.prog.removeprefix('python -m framework ')}: {message}; see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raises HelpShown."""
        if message:
            self._print_message(message, sys.stderr)
        raise HelpShown(status)

    def option(self, *names: str, **kwargs: Any) -> None:
        """As `add_option`."""
        add_option(self, *names, **kwargs)


def add_option(target: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **kwargs: Any) -> None:
    """An option in both spellings, --a_b and --a-b, of a parser or of a group in its help."""
    both = [spelled for name in names for spelled in dict.fromkeys((name, name[:2] + name[2:].replace("_", "-")))]
    target.add_argument(*both, **kwargs)


LOG_LEVEL: Final = "DSF_LOG_LEVEL"


class _LogLevel(argparse.Action):
    """Puts the level where every process that is started from here finds it, on other hosts as well."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        os.environ[LOG_LEVEL] = values


def add_log_level(parser: CommandParser) -> None:
    """Add ``--log_level``, as train.py and `launch` take it."""
    levels = ("debug", "info", "warning", "error")
    sense = "least level of messages in the logs of ranks, DeepSpeed's too; default info"
    parser.option("--log_level", action=_LogLevel, dest=argparse.SUPPRESS, choices=levels, help=sense)


def whole(least: int, below: int, error: str) -> Callable[[str], int]:
    """The type of an option that is a whole number; `error` takes the text that is none."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) < below):
            raise argparse.ArgumentTypeError(error.format(text))
        return int(text)

    return read


def like(pattern: str, convert: Callable[[str], _T], error: str) -> Callable[[str], _T]:
    """The type of an option whose text has a form; `error` takes the text that has another."""

    def read(text: str) -> _T:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(error.format(text))
        return convert(text)

    return read
