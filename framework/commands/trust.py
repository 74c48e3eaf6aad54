"""The `trust` command: folders in which checkpoints may call the code that they name."""

from __future__ import annotations

from collections.abc import Sequence

from framework.checkpoint.trust import (
    distrust_folder,
    trust_folder,
    trusted_file,
    trusted_folders,
)
from framework.errors import EXIT_OK, UsageError
from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser


def main(words: Sequence[str]) -> int:
    """Add folders to the user's list, remove them, or print it; returns the exit code."""
    arguments = parse_command("trust", _add_arguments, words)
    if arguments.remove and not arguments.folders:
        raise UsageError("trust: --remove needs a folder; see the list: dsf trust")
    for name in arguments.folders:
        if arguments.remove:
            print(f"removed: {distrust_folder(name)}")
        else:
            print(f"trusted: {trust_folder(name)}")
    if not arguments.folders:
        _print_list()
    return EXIT_OK


def _print_list() -> None:
    folders = trusted_folders()
    for folder in folders:
        print(folder)
    if not folders:
        print(f"no folder is listed in {trusted_file()}")


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help="a run folder, or one around it; left out: the list is printed",
    )
    parser.add_argument("--remove", action="store_true", help="take these folders off the list")
