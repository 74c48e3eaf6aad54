"""The `completion` command: prints a script that lets bash, zsh or fish complete commands, options
and keys. The scripts are shtab's, made from the parsers of the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from framework.commands.table import BUILT_IN
from framework.errors import EXIT_OK, ConfigError, missing_package
from framework.system.arguments import parse_command
from framework.system.command_names import PROGRAM
from framework.system.command_parser import CommandParser, taken_parser

if TYPE_CHECKING:
    from shtab import CompleteType

SHELLS: Final = ("bash", "zsh", "fish")
# What a positional argument takes: a file, or a setting. KEYS is filled in.
_WORDS: Final[Mapping[str, str]] = {
    "bash": """\
_dsf_words() {
  compgen -f -- "$1"
  compgen -W "KEYS" -- "$1"
}
""",
    "zsh": """\
_dsf_words() {
  local -a keys
  keys=(KEYS)
  _alternative 'files:file:_files' 'settings:setting:compadd -S "" -a keys'
}
""",
    "fish": """\
function _dsf_words
  __fish_complete_path (commandline -ct)
  printf '%s\\n' KEYS
end
""",
}
# bash: no blank and no backslash after a key and its equals sign.
_AFTER_BASH: Final = """
_dsf() {
  _shtab_dsf
  [[ ${COMPREPLY[0]-} != *= ]] || compopt +o filenames -o nospace
}
complete -o filenames -F _dsf dsf
"""
_COMPLETES_WORDS: Final = {"bash": "_dsf_words", "zsh": "_dsf_words", "fish": "(_dsf_words)"}
# Words that name the value of an argument in the help, such as FILE in ``FILE.html``.
_FOLDERS: Final = frozenset({"FOLDER", "DIR", "OUT_DIR", "RUN", "CHECKPOINT"})
_FILES: Final = frozenset({"FILE", "HOSTFILE", "PATH", "OUT", "LOG"})


def main(words: Sequence[str]) -> int:
    """Print the script of a shell; returns the exit code."""
    arguments = parse_command("completion", _add_arguments, words)
    print(script(arguments.shell), end="")
    return EXIT_OK


def _add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Print what a shell needs to complete commands, options and keys of run configs; where to "
        "put it stands in docs/start.md."
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def script(shell: str) -> str:
    """Return the script of a shell, which takes some seconds: the parsers of commands that need
    torch import it. Where torch is missing, only the names of these commands are completed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise missing_package("shtab", what="completion") from error
    from framework.config.key_list import key_forms

    keys = " ".join(f"{key}=" for key in key_forms())
    preamble = _WORDS[shell].replace("KEYS", keys)
    text: str = shtab.complete(_tree(shtab.FILE, shtab.DIR), shell=shell, preamble=preamble)
    if shell == "bash":
        text += _AFTER_BASH
    return text


def _tree(file: CompleteType, folder: CompleteType) -> argparse.ArgumentParser:
    """Return a parser of the whole command line, in which the commands are parsers of words.

    Args:
        file, folder: how shtab completes a path.
    """
    root = argparse.ArgumentParser(prog=PROGRAM)
    root.add_argument("--version", action="store_true", help="print the release")
    commands = root.add_subparsers()
    groups = {"": commands}
    for command in BUILT_IN:
        group, _, name = command.name.rpartition(" ")
        if command.name == "launch":  # its own words are as for train
            groups["launch"] = commands.add_parser(name, help=command.help).add_subparsers()
            continue
        taken = parser_of(command.main)
        if taken is None:
            groups[group].add_parser(name, help=command.help)
            continue
        for action in taken._actions:
            _add_completion(action, file, folder)
        groups[group].add_parser(name, help=command.help, parents=[taken], add_help=False)
    return root


def parser_of(command: Callable[[Sequence[str]], int]) -> CommandParser | None:
    """Return the parser that a command makes; None where a package is missing."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # importing DeepSpeed prints
            return taken_parser(lambda: command(["x"]))
    except ConfigError:
        return None


def _add_completion(action: argparse.Action, file: CompleteType, folder: CompleteType) -> None:
    """Set how a shell completes an argument: by what its value is called in the help, and other
    positional arguments by files and settings. shtab itself completes choices.
    """
    if action.choices is not None:
        return
    names = set(re.split(r"[|.]", str(action.metavar)))
    if names & _FOLDERS:
        action.complete = folder  # type: ignore[attr-defined]
    elif not action.option_strings:
        action.complete = _COMPLETES_WORDS  # type: ignore[attr-defined]
    elif names & _FILES:
        action.complete = file  # type: ignore[attr-defined]
