"""The parser of a command line, for every command that reads one of its own."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from framework.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """argparse with one line for a mistake, and options in both spellings."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError: what is wrong, and where the help is."""
        raise UsageError(f"{self.prog.removeprefix('python -m framework ')}: {message}; see {self.prog} --help")

    def option(self, *names: str, **kwargs: Any) -> None:
        """An option in both spellings, --a_b and --a-b."""
        both = [spelled for name in names for spelled in dict.fromkeys((name, name[:2] + name[2:].replace("_", "-")))]
        self.add_argument(*both, **kwargs)
