"""Rows of text for training and evaluation: of files, or of the documentation of Python's own
library, which is on every machine and differs between versions.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from framework.data.tokens import EvaluationShare
from framework.errors import ConfigError

Row = Mapping[str, Any]
Made = TypeVar("Made")

DOCUMENTED: Final = (
    "builtins",
    "datetime",
    "math",
    "os",
    "shutil",
    "statistics",
    "string",
    "threading",
)


def dealt(
    paths: tuple[str | None, str | None],
    fraction: float,
    make: Callable[[str, Row], Made],
    own: Callable[[], Iterator[Row]],
) -> tuple[list[Made], list[Made]]:
    """Samples of training and evaluation.

    Args:
        paths: of training (None: the rows of `own`) and of evaluation (None: every so many of the
            first, by `fraction`); ``.csv``, otherwise JSON lines.
        fraction: 0 for no evaluation.
        make: a sample from its place, ``file:line``, and its row; raises `ValueError` with what is
            wrong with it.
        own: rows that no file has to hold.

    Raises:
        ConfigError: kind ``rows-not-read``.
    """
    share = EvaluationShare(0.0 if paths[1] else fraction)
    parts = (list[Made](), list[Made]())
    for number, (key, path) in enumerate(zip(("data.path", "data.eval_path"), paths, strict=True)):
        place: Any = path
        try:
            for place, row in (
                _read(Path(path).expanduser()) if path else enumerate(() if number else own())
            ):
                parts[number or share.takes(len(str(row)))].append(make(str(place), row))
        except (OSError, ValueError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            fix = "mend it, or name another"
            raise ConfigError.of("rows-not-read", f"{place}: {reason}", fix, key, path) from error
    return parts


def _read(file: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file with their places."""
    with file.open(encoding="utf-8", newline="") as stream:
        if file.suffix == ".csv":
            table = csv.DictReader(stream)
            yield from ((f"{file}:{table.line_num}", row) for row in table)
            return
        for number, line in enumerate(stream, start=1):
            try:
                if line.strip():
                    found = json.loads(line)
                else:
                    found = None
            except (ValueError, RecursionError):
                found = ()
            if found is not None and not isinstance(found, dict):
                raise ValueError(f"line {number} is no JSON object")
            if found is not None:
                yield f"{file}:{number}", found


def sentences() -> Iterator[Row]:
    """First sentences of what functions document, and the names of their modules."""
    for module in DOCUMENTED:
        yield from ({"text": text, "label": module} for _, text, _ in _documented(module))


def questions() -> Iterator[Row]:
    """Conversations: what a function does, and how it is called."""
    for name, text, called in (one for module in DOCUMENTED for one in _documented(module)):
        turns = [f"What does {name} do?", text, *(("How is it called?", called) if called else ())]
        roles = ("user", "assistant") * 2
        yield {
            "messages": [
                {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)
            ]
        }


def _documented(module: str) -> Iterator[tuple[str, str, str]]:
    """Name, first sentence and call of the functions of a module, methods of its classes
    included.
    """
    seen = set[str]()
    for outer, thing in sorted(vars(importlib.import_module(module)).items()):
        inner = (
            sorted(vars(thing).items())
            if inspect.isclass(thing) and thing.__module__ == module
            else ()
        )
        for name, one in ((outer, thing), *((f"{outer}.{name}", one) for name, one in inner)):
            if re.search(r"(^|\.)_", name) or not callable(one):
                continue
            text = re.split(
                r"(?<=[.!?]) ", " ".join((inspect.getdoc(one) or "").split()), maxsplit=1
            )[0]
            if 12 <= len(text) <= 300 and text not in seen:
                seen.add(text)
                called = ""
                with suppress(ValueError, TypeError):
                    called = f"{module}.{name}{inspect.signature(one)}"
                # An object among the defaults is shown with its address, which another process has
                # not.
                yield f"{module}.{name}", text, "" if " at 0x" in called else called
