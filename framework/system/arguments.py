"""The parser of a command line, for every command that reads one of its own."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import Field, field, fields
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
        raise UsageError(
            f"{self.prog.removeprefix('python -m framework ')}: {message}; see {self.prog} --help"
        )

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raises HelpShown."""
        if message:
            self._print_message(message, sys.stderr)
        raise HelpShown(status)

    def option(self, *names: str, **kwargs: Any) -> None:
        """As `add_option`."""
        add_option(self, *names, **kwargs)


def add_option(
    target: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **kwargs: Any
) -> None:
    """An option in both spellings, --a_b and --a-b, of a parser or of a group in its help."""
    both = [
        spelled
        for name in names
        for spelled in dict.fromkeys((name, name[:2] + name[2:].replace("_", "-")))
    ]
    target.add_argument(*both, **kwargs)


def option(
    text: str,
    metavar: str = "",
    read: Callable[[str], Any] = str,
    *,
    default: Any = "",
    many: bool = False,
    choices: Collection[str] = (),
    names: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """A field of a dataclass that is an option, for `add_options`: a switch unless it has a
    `metavar` or `choices`.

    Args:
        text: for the help.
        read: makes the value out of a word, or raises ArgumentTypeError.
        many: the field holds all values.
        names: of the option, if not the field's.
    """
    if choices:
        more |= {"choices": choices}
    elif metavar:
        more |= {"metavar": metavar, "type": read} | ({"action": "append"} if many else {})
    else:
        more |= {"action": "store_true"}
    value = () if many else default if metavar or choices else False
    return field(default=value, metadata={"help": text, "names": names} | more)


def flags_of(each: Field[Any]) -> tuple[str, ...]:
    """The names of the option that a field is; none: it is not one."""
    if each.metadata:
        return each.metadata["names"] or (f"--{each.name}",)
    return ()


def add_options(
    parser: CommandParser,
    request: Any,
    *,
    only: Collection[str] = (),
    grouped: str = "",
    apart: Collection[str] = (),
) -> None:
    """Add the options that are fields of a dataclass, or `only` some; under a heading those that do
    not stand apart.
    """
    group = parser.add_argument_group(grouped) if grouped else parser
    for each in fields(request):
        if each.metadata and (each.name in only or not only):
            terms = {name: value for name, value in each.metadata.items() if name != "names"}
            # argparse would read the default of a text, and append to that of many.
            is_kept = each.default == () or (
                isinstance(each.default, str) and terms.get("type", str) is not str
            )
            terms |= {"dest": each.name, "default": argparse.SUPPRESS if is_kept else each.default}
            add_option(parser if each.name in apart else group, *flags_of(each), **terms)


LOG_LEVEL: Final = "DSF_LOG_LEVEL"


class _LogLevel(argparse.Action):
    """Puts the level where every process that is started from here finds it, on other hosts as
    well.
    """

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        os.environ[LOG_LEVEL] = values


def add_log_level(parser: CommandParser) -> None:
    """Add ``--log_level``, as train.py and `launch` take it."""
    levels = ("debug", "info", "warning", "error")
    sense = "least level of messages in the logs of ranks, DeepSpeed's too; default info"
    parser.option(
        "--log_level", action=_LogLevel, dest=argparse.SUPPRESS, choices=levels, help=sense
    )


def whole(least: int, below: int, error: str) -> Callable[[str], int]:
    """The type of an option that is a whole number; `error` takes the text that is none."""

    def read(text: str) -> int:
        if not (
            text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) < below
        ):
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
