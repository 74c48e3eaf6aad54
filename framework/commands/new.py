"""`new`: a small project that trains at once, in which the user replaces model and data."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.config.schema import schema_text
from framework.errors import EXIT_OK, StorageError, UsageError
from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser

_TEMPLATES: Final = Path(__file__).parent / "project"
# Template -> place in the project; the others lie at its top.
_PLACES: Final = {
    "model.py": "@PACKAGE@/model.py",
    "data.py": "@PACKAGE@/data.py",
    "task.py": "@PACKAGE@/task.py",
    "test_training.py": "tests/test_training.py",
    "gitignore": ".gitignore",
}

_LONGEST_SHOWN: Final = 80


def main(words: Sequence[str]) -> int:
    """Write the project, and print its files and how to start it; returns the exit code."""
    arguments = parse_command("new", _add_arguments, words)
    written = new(arguments.name)
    print("\n".join(map(str, written)))
    print(f"\ncd {shlex.quote(arguments.name)}")
    shell = _shell_of_this_python()
    shell_path = os.environ.get("DSF_SHELL_PATH") or os.environ.get("PATH")
    if shutil.which("dsf", path=shell_path) != str(_program()):
        print(shell.begin)
    print(f"{shell.dsf} train run.yaml")
    return EXIT_OK


@dataclass(frozen=True)
class _Shell:
    """How a shell starts things in this Python's environment.

    Attributes:
        begin: a line that comes once in a shell, before the others.
        dsf: the command of this package.
        python: the interpreter.
    """

    begin: str
    dsf: str
    python: str


def _program() -> Path:
    """Return the place of the command `dsf` beside this Python, where it may not be installed."""
    return Path(sys.executable).with_name("dsf")


def _shell_of_this_python() -> _Shell:
    """Return how a shell starts this Python, whether the package is installed in it or lies in a
    checkout beside it.
    """
    activate = Path(sys.prefix, "bin", "activate")
    if _program().exists() and activate.exists():
        return _Shell(f"source {shlex.quote(str(activate))}", "dsf", "python")
    if _program().exists():
        folder = shlex.quote(str(_program().parent))
        return _Shell(f"export PATH={folder}:$PATH", "dsf", Path(sys.executable).name)
    checkout = shlex.quote(str(Path(__file__).parents[2]))
    python = shlex.quote(sys.executable)
    return _Shell(f"export PYTHONPATH={checkout}", f"{python} -m framework", python)


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the project and its folder")


def new(name: str) -> list[Path]:
    """Write the project into a new folder of its name; returns its files.

    Args:
        name: of the project and of the run; the Python package has ``_`` for ``-`` in it.

    Raises:
        UsageError: it is no name of a package, another package has it, or the folder is not empty.
        StorageError: the project cannot be written there.
    """
    try:
        return _write(name)
    except OSError as error:
        if len(name) <= _LONGEST_SHOWN:
            place = name
        else:
            place = f"{name[:_LONGEST_SHOWN]}..."
        reason = error.strerror or error
        raise StorageError(
            f"new: {place}: cannot be written ({reason}); take another place or name "
            "[file-not-written]"
        ) from error


def _refuse_taken(folder: Path, package: str) -> None:
    """Raise UsageError if another package has the name, or the folder is not empty."""
    if importlib.util.find_spec(package) is not None and not folder.exists():
        raise UsageError(
            f"new: there is a Python package {package} already, which would be imported; take "
            "another name"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"new: {folder} is there already and is not an empty folder; nothing was written"
        )


def _write(name: str) -> list[Path]:
    folder = Path(name)
    package = folder.name.replace("-", "_").replace(".", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", package) or keyword.iskeyword(package):
        raise UsageError(
            f"new: {name!r} is no name of a Python package; take letters, digits, - and _"
        )
    _refuse_taken(folder, package)
    shell = _shell_of_this_python()
    replaced = {
        "@PACKAGE@": package,
        "@NAME@": folder.name,
        "@BEGIN@": shell.begin,
        "@DSF@": shell.dsf,
        "@PYTHON@": shell.python,
    }
    written = []
    for template in sorted(_TEMPLATES.glob("*.in")):
        place = folder / _PLACES.get(template.stem, template.stem).replace("@PACKAGE@", package)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = template.read_text(encoding="utf-8")
        for mark, value in replaced.items():
            text = text.replace(mark, value)
        place.write_text(text, encoding="utf-8")
        written.append(place)
    schema = folder / "run.schema.json"
    schema.write_text(schema_text(), encoding="utf-8")
    written.append(schema)
    for package_folder in (package, "tests"):
        init_file = folder / package_folder / "__init__.py"
        init_file.touch()
        written.append(init_file)
    return written
