"""Arguments of commands: options as fields of a dataclass, their types, and the words between."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from framework.errors import UsageError
from framework.system.command_parser import CommandParser

_T = TypeVar("_T")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that take a checkpoint of a run."""
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help="of the run: a step, or best by checkpoint.keep_best; left out: the newest",
    )


def _step(text: str) -> str:
    if text == "best" or re.fullmatch("[0-9]{1,18}", text):
        return text
    raise argparse.ArgumentTypeError(f"'{text}' is no step; write a number, or best")


def parse_command(
    name: str,
    add_arguments: Callable[[CommandParser], None],
    words: Sequence[str],
    *,
    description: str | None = None,
) -> argparse.Namespace:
    """Parse the words after a command's name. Settings (``key=value``), if the command has the
    positional argument `words`, may stand before, between and after options: argparse alone takes
    positional words from one place only.

    Args:
        name: of the command.
        add_arguments: adds what the command takes.
        words: of the command line.
        description: for the help.

    Raises:
        UsageError: the words are wrong.
        HelpShown: the words request the help, which is printed.
    """
    parser = CommandParser(prog=f"dsf {name}", description=description)
    add_arguments(parser)
    arguments: argparse.Namespace
    arguments, rest = parser.parse_known_args(words)
    unrecognized = rest
    if hasattr(arguments, "words"):
        unrecognized = [word for word in rest if word.startswith("-")]
    if unrecognized:
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    if rest:
        arguments.words += rest
    return arguments


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
    """Return a field of a dataclass that is an option, for `add_options`.

    It is a switch unless it has a `metavar` or `choices`.

    Args:
        text: for the help.
        metavar: name of the value in the help.
        read: makes the value out of a word, or raises ArgumentTypeError.
        default: of the field.
        many: whether the option may be given again, and the field holds all values.
        choices: all values.
        names: of the option, if it has not the field's name.
        more: further arguments of argparse's `add_argument`.
    """
    if choices:
        more["choices"] = choices
    elif metavar:
        more["metavar"] = metavar
        more["type"] = read
        if many:
            more["action"] = "append"
    else:
        more["action"] = "store_true"
        default = False
    if many:
        default = ()
    return field(default=default, metadata={"help": text, "names": names} | more)


def flags_of(option_field: Field[Any]) -> tuple[str, ...]:
    """Return the names of a field's option; none if it is not an option."""
    if option_field.metadata:
        return option_field.metadata["names"] or (f"--{option_field.name}",)
    return ()


def add_options(
    parser: CommandParser,
    request: Any,
    *,
    only: Collection[str] = (),
    grouped: str = "",
    apart: Collection[str] = (),
) -> None:
    """Add the options that are fields of a dataclass.

    Args:
        parser: gets the options.
        request: the dataclass.
        only: names of the fields to add; none: all.
        grouped: heading of the options in the help; empty: none.
        apart: names of the fields that do not stand under that heading.
    """
    group = parser.add_argument_group(grouped) if grouped else parser
    for option_field in fields(request):
        name = option_field.name
        if not option_field.metadata or (only and name not in only):
            continue
        terms = dict(option_field.metadata)
        del terms["names"]
        terms["dest"] = name
        # argparse would convert a default that is a text, and append to one that is a list. With
        # SUPPRESS it sets no value, and the dataclass's own default holds.
        default = option_field.default
        is_converted = isinstance(default, str) and terms.get("type", str) is not str
        terms["default"] = argparse.SUPPRESS if default == () or is_converted else default
        target = parser if name in apart else group
        target.add_argument(*flags_of(option_field), **terms)


def refuse(command: str, mistakes: Iterable[tuple[object, str]]) -> None:
    """Raise UsageError for the first of the pairs (condition, sentence) with a true condition."""
    for is_wrong, sentence in mistakes:
        if is_wrong:
            raise UsageError(f"{command}: {sentence}")


def whole(least: int, below: int, error: str) -> Callable[[str], int]:
    """Return the type of an option that is a whole number.

    Args:
        least, below: the number is at least `least`, and less than `below`.
        error: message with ``{}`` for the wrong text.
    """

    def read(text: str) -> int:
        # int() has an error of its own for a text of more than 4300 digits
        is_number = text.isascii() and text.isdecimal() and len(text) < 20
        if not is_number or not least <= int(text) < below:
            raise argparse.ArgumentTypeError(error.format(text))
        return int(text)

    return read


def like(pattern: str, convert: Callable[[str], _T], error: str) -> Callable[[str], _T]:
    """Return the type of an option that `convert` makes of a text if all of it matches `pattern`.

    `error` is the message otherwise, with ``{}`` for the text.
    """

    def read(text: str) -> _T:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(error.format(text))
        return convert(text)

    return read
