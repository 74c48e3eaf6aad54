"""The table of all commands of `dsf`: built-in ones, and commands of installed
packages, which are entry points of the group `dsf.commands`.

A command's module is imported when the command is called. `framework.registry` looks for installed
packages only where the word is no built-in command, and for the help.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from framework import registry
from framework.errors import ConfigError, Problem, UsageError, missing_package
from framework.system.command_names import BY_NAME
from framework.system.exits import refusing_exits
from framework.system.garbage import collect_as_usual

GROUP: Final = "dsf.commands"


class AnyCommand(Protocol):
    """What the table looks up: a command with its line of help."""

    @property
    def name(self) -> str:
        """The words that call it."""

    @property
    def help(self) -> str:
        """Its line in the list of all commands."""

    def main(self, words: Sequence[str]) -> int:
        """Run it with the words after its name; returns the exit code."""


@dataclass(frozen=True)
class BuiltIn:
    """A command of this package.

    Attributes:
        name: the words that call it, with a line of help in `framework.system.command_names`.
        place: of a function that gets the words after the name and returns the exit code, as
            ``module:function``.
        needs_torch: whether its module needs more than the base install.
    """

    name: str
    place: str
    needs_torch: bool = False

    @property
    def help(self) -> str:
        """Its line in the list of all commands."""
        return BY_NAME[self.name].help

    def main(self, words: Sequence[str]) -> int:
        """Import the function and run it."""
        if not self.needs_torch:
            return self._function()(words)
        function = self._function_with_torch()
        collect_as_usual()  # cycles may hold tensors
        with refusing_exits():  # the user's code runs there
            return function(words)

    def _function(self) -> Callable[[Sequence[str]], int]:
        module, _, function = self.place.partition(":")
        imported: Callable[[Sequence[str]], int] = getattr(
            importlib.import_module(module), function
        )
        return imported

    def _function_with_torch(self) -> Callable[[Sequence[str]], int]:
        try:
            # DeepSpeed prints the device that it found when it is imported
            with contextlib.redirect_stdout(io.StringIO()):
                return self._function()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in (
                "framework",
                "deepspeed_lint",
            ):
                raise
            raise missing_package(error.name, what=self.name) from error


BUILT_IN: Final = (
    BuiltIn("check", "framework.commands.check:main"),
    BuiltIn("plan", "framework.commands.plan:main"),
    BuiltIn("render", "framework.commands.render:main"),
    BuiltIn("keys", "framework.commands.keys:main"),
    BuiltIn("completion", "framework.commands.completion:main"),
    BuiltIn("schema", "framework.commands.schema:main"),
    BuiltIn("import", "framework.imports.command:main"),
    BuiltIn("new", "framework.commands.new:main"),
    BuiltIn("inspect", "framework.commands.inspect:main"),
    BuiltIn("report", "framework.commands.report:main"),
    BuiltIn("prepare", "framework.recipes.text.prepare:main", needs_torch=True),
    BuiltIn("generate", "framework.commands.generate:main", needs_torch=True),
    BuiltIn("export", "framework.commands.export:main", needs_torch=True),
    BuiltIn("evaluate", "framework.commands.evaluate:main", needs_torch=True),
    BuiltIn("predict", "framework.commands.predict:main", needs_torch=True),
    BuiltIn("trust", "framework.commands.trust:main"),
    BuiltIn("lr-range", "framework.commands.lr_range:main", needs_torch=True),
    BuiltIn("doctor", "framework.commands.doctor:doctor"),
    BuiltIn("bench", "framework.commands.bench:bench"),
    BuiltIn("train", "framework.launch.local:train"),
    BuiltIn("launch", "framework.launch.local:launch"),
    BuiltIn("launch node", "framework.launch.node:main"),
    BuiltIn("launch k8s", "framework.deploy.k8s.command:main"),
    BuiltIn("launch slurm", "framework.deploy.slurm:main"),
)
_BY_NAME: Final[Mapping[str, BuiltIn]] = {command.name: command for command in BUILT_IN}
_MOST_WORDS: Final = 2  # in a command's name


def find_command(words: Sequence[str]) -> tuple[AnyCommand, Sequence[str]]:
    """Return the command that the words begin with, and the words after its name.

    Raises:
        UsageError: there is no such command.
        ConfigError: a package that registers the command is at fault.
    """
    for length in range(_MOST_WORDS, 0, -1):
        command = _BY_NAME.get(" ".join(words[:length]))
        if command is not None:
            return command, words[length:]
    registered = registry.find(GROUP, words[0])
    if registered is None:
        raise _no_command(words[0])
    return _load(registered), words[1:]


def list_commands() -> tuple[list[AnyCommand], list[Problem]]:
    """Return all commands, and what is wrong with other packages' commands."""
    commands: list[AnyCommand] = list(BUILT_IN)
    problems: list[Problem] = []
    for name, installed in sorted(registry.installed(GROUP).items()):
        try:
            if name in _BY_NAME:
                raise installed[0].broken("the framework has a command of this name")
            registered = registry.find(GROUP, name)
            if registered is not None:
                commands.append(_load(registered))
        except ConfigError as error:
            problems += error.problems
    return commands, problems


def _load(registered: registry.Registered) -> AnyCommand:
    """Import the command of another package.

    Raises:
        ConfigError: it is no command.
    """
    from framework.commands.command import Command

    command = registered.load()
    collect_as_usual()
    if not isinstance(command, Command) or command.name != registered.name:
        raise registered.broken("that is no framework.commands.command.Command of this name")
    return command


# What other tools call a command, and what is typed here instead.
_OTHER_NAMES: Final = {
    "fit": "train",
    "run": "train",
    "start": "train",
    "resume": "train CONFIG checkpoint.resume=auto",
    "continue": "train CONFIG checkpoint.resume=auto",
    "test": "evaluate",
    "validate": "evaluate for a checkpoint, check for a config",
    "infer": "predict",
    "inference": "predict",
    "lint": "check",
    "init": "new",
    "convert": "import for a config, export for a checkpoint",
    "merge": "export",
    "config": "keys",
    "slurm": "launch slurm",
    "k8s": "launch k8s",
    "node": "launch node",
    "benchmark": "bench",
}


def _no_command(word: str) -> UsageError:
    from deepspeed_lint.text.typos import nearest

    names = list(dict.fromkeys([*_BY_NAME, *registry.installed(GROUP)]))
    guess = _OTHER_NAMES.get(word) or nearest(word, names)
    if guess is None:
        fix = f"choose from {', '.join(names)}"
    else:
        fix = f"did you mean {guess}?"
    return UsageError(f"dsf: argument COMMAND: invalid choice: {word!r} ({fix}); see dsf --help")
