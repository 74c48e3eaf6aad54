"""The parser of a command line, for every command that reads one of its own."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import Field, field, fields
from typing import Any, Final, NoReturn, TypeVar

from framework.errors import UsageError

_T = TypeVar("_T")


class HelpShown(SystemExit):
    """End of a command that has printed its help or its release, as requested."""


class ParserTaken(BaseException):
    """End of a command at the parser that it has made, see `taken_parser`."""


# Positional arguments of commands that take settings ``key=value``.
_TAKE_SETTINGS: Final = ("settings", "words")
_TAKES_PARSERS: Final = ContextVar("_TAKES_PARSERS", default=False)


def taken_parser(command: Callable[[], object]) -> CommandParser:
    """Call a command up to the words that it would parse, and return its parser."""
    token = _TAKES_PARSERS.set(True)
    try:
        command()
    except ParserTaken as taken:
        parser: CommandParser = taken.args[0]
        return parser
    finally:
        _TAKES_PARSERS.reset(token)
    raise AssertionError("this command parses no words")


class CommandParser(argparse.ArgumentParser):
    """argparse with one line for a mistake, options in both spellings, and a help of 80 columns
    that ends with examples and the page of the docs.
    """

    def __init__(self, *words: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*words, **options)

    def parse_known_args(  # type: ignore[override]  # argparse's own has overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse words in which an option may be written in the other spelling, --a-b for --a_b."""
        if _TAKES_PARSERS.get():
            raise ParserTaken(self)
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            self.learn_spelling(word.partition("=")[0])
        return super().parse_known_args(words, namespace)

    def learn_spelling(self, name: str) -> None:
        """Take a name as an option, if it is the other spelling of one; the help shows the
        spelling in which the option was added.
        """
        actions = self._option_string_actions
        if name.startswith("--") and name not in actions:
            for known, action in list(actions.items()):
                if _snake(known) == _snake(name):
                    actions[name] = action
                    break

    def format_help(self) -> str:
        """Return argparse's help, with the examples and the page of the command below it."""
        from framework.system.command_names import epilog_of

        more = epilog_of(self.prog)
        if more:
            return f"{super().format_help()}\n{more}\n"
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message, and where the help is."""
        flag = re.match(r"argument (--\w+).*: expected one argument$", message)
        if flag:  # argparse takes the next word for another option
            message += f" (if it begins with a dash, write {flag[1]}=-...)"
        if any(action.dest in _TAKE_SETTINGS for action in self._actions):
            message = _without_settings(message)
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message += self._did_you_mean(unknown[1])
        command = self.prog.removeprefix("dsf ")
        raise UsageError(f"{command}: {message}; see {self.prog} --help")

    def _did_you_mean(self, name: str) -> str:
        import difflib  # after a mistake alone

        # Of the spellings that the help shows; those that were typed are learned beside them.
        shown = {}
        for action in self._actions:
            for option in action.option_strings[:1]:
                shown[_snake(option)] = option
        found = difflib.get_close_matches(_snake(name), shown, n=1, cutoff=0.75)
        return f" (did you mean {shown[found[0]]}?)" if found else ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise HelpShown."""
        if message:
            self._print_message(message, sys.stderr)
        raise HelpShown(status)


def _without_settings(message: str) -> str:
    """Leave settings, which the command takes, out of a message of words that it does not know."""
    start = "unrecognized arguments: "
    if not message.startswith(start):
        return message
    words = message.removeprefix(start).split(" ")
    options = [word for word in words if word.startswith("-")]
    if not options:
        return message
    return start + " ".join(options)


def _snake(name: str) -> str:
    return name.replace("-", "_")


class _HelpFormatter(argparse.HelpFormatter):
    """argparse's, which leaves a usage line as it was given: here it is wrapped."""

    def _format_usage(self, usage: str | None, *others: Any) -> str:
        text = super()._format_usage(usage, *others)
        if usage is None:
            return text
        # a part in brackets stays on one line
        parts = re.findall(r"\[[^\]]*\](?:\.\.\.)?|\S+", text)
        lines = [parts[0]]
        for part in parts[1:]:
            if len(lines[-1]) + 1 + len(part) <= self._width:
                lines[-1] += f" {part}"
            else:
                lines.append(f"       {part}")
        return "\n".join(lines) + "\n\n"


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
    """Parse the words behind a command's name. Settings (``key=value``), if the command has the
    positional argument `words`, may stand before, between and behind options: argparse alone takes
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


LOG_LEVEL: Final = "DSF_LOG_LEVEL"


class _LogLevel(argparse.Action):
    """Puts the level into the environment, for all processes of the job, on other hosts as well."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        os.environ[LOG_LEVEL] = values


def add_log_level(parser: CommandParser) -> None:
    """Add ``--log_level``, as train.py and `launch` take it."""
    levels = ("debug", "info", "warning", "error")
    text = "least level of messages in the logs of ranks, DeepSpeed's too; default info"
    parser.add_argument(
        "--log_level", action=_LogLevel, dest=argparse.SUPPRESS, choices=levels, help=text
    )


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
