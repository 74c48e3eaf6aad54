"""What a command of `dsf` is, for commands of other packages.

A package offers one as an entry point of the group `dsf.commands`, under the command's name:

    [project.entry-points."dsf.commands"]
    tally = "tally.command:COMMAND"
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser


@dataclass(frozen=True)
class Command:
    """A command of another package.

    Attributes:
        name: the word that calls it.
        help: a line for the list of all commands.
        add_arguments: adds the arguments to a parser. An argument `words` with ``nargs="*"`` gets
            the settings `key=value`, also those after options.
        run: runs the command with its arguments and returns the exit code; a FrameworkError of
            `framework.errors` ends it with one line.
    """

    name: str
    help: str
    add_arguments: Callable[[CommandParser], None]
    run: Callable[[argparse.Namespace], int]

    def main(self, words: Sequence[str]) -> int:
        """Run the command with the words after its name; returns the exit code."""
        arguments = parse_command(self.name, self.add_arguments, words, description=self.help)
        return self.run(arguments)
