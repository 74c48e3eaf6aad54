"""argparse as every command line is read: one line for a mistake, and both spellings."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from framework.errors import UsageError


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
