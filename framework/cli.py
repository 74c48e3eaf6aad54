"""The command line: the first words name a command of `framework.commands.table`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Final

import framework
from framework.commands.table import find_command, list_commands
from framework.errors import EXIT_OK, EXIT_TRAINING, EXIT_USAGE, FrameworkError
from framework.system.command_names import BY_NAME, PROGRAM, listed_groups
from framework.system.command_parser import CommandParser
from framework.system.output import write
from framework.system.parent_watch import record_failure

_MORE: Final = """\
dsf COMMAND --help has its options and examples. Options go in both spellings,
--num_gpus and --num-gpus. Settings key=value win over the file."""
_STARTS_A_RUN: Final = ("train", "launch", "launch node")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a file name may be any bytes
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)
    try:
        code = _run(words)
        # stdout is flushed here: at exit, a reader that has left would be an error message
        if sys.stdout is not None:  # the process may have been started without
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed its end
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if _starts_a_run(words):  # the reader has not seen how the run ended
            return EXIT_TRAINING
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    return code


def _starts_a_run(words: Sequence[str]) -> bool:
    if not words or words[0] not in ("train", "launch"):
        return False
    command, _ = find_command(words)  # `launch k8s` is another command
    return command.name in _STARTS_A_RUN


def _run(words: Sequence[str]) -> int:
    try:
        if not words:
            write(sys.stderr, _parser().format_help())
            return EXIT_USAGE
        if words[0].startswith("-"):
            _parser().parse_args(words)
        command, rest = find_command(words)
        return command.main(rest)
    except FrameworkError as error:
        record_failure(str(error))
        write(sys.stderr, f"{error}\n")
        from framework.commands.explained import kinds_in, write_hint

        write_hint(kinds_in(str(error)))
        return error.exit_code


def _parser() -> CommandParser:
    """Return a parser of the words before a command, with all commands in its help; plug-ins that
    cannot be used are printed.
    """
    commands, problems = list_commands()
    others = {command.name: command.help for command in commands if command.name not in BY_NAME}
    parser = CommandParser(
        prog=PROGRAM,
        usage="%(prog)s COMMAND ...",
        description="Typed training runs on DeepSpeed.",
        epilog=f"{listed_groups(others)}\n\n{_MORE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"dsf-trainer {framework.__version__}"
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the list below")
    for problem in problems:
        write(sys.stderr, f"warning: {problem}\n")
    return parser
