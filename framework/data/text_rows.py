"""Rows of text from files, dealt to training and evaluation, and rows that Python's own documentation gives: real text
that is on every machine, and differs between versions of Python.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from framework.data.tokens import EvaluationShare
from framework.errors import ConfigError

Row = Mapping[str, Any]
Made = TypeVar("Made")

DOCUMENTED: Final = ("builtins", "datetime", "math", "os", "shutil", "statistics", "string", "threading")
_LONGEST: Final = 300


def dealt(
    path: str | None,
    eval_path: str | None,
    fraction: float,
    make: Callable[[str, Row], Made],
    own: Callable[[], Iterator[Row]],
) -> tuple[list[Made], list[Made]]:
    """Samples of training and evaluation.

    Args:
        path: ``.csv``, otherwise JSON lines; None: the rows of `own`.
        eval_path: file of the evaluation; None: every so many rows of the first, by `fraction`.
        fraction: 0 for no evaluation.
        make: a sample from its place, ``file:line``, and its row; raises `ValueError` with what is wrong with it.
        own: rows that no file has to hold.

    Raises:
        ConfigError: kind ``rows-not-read``.
    """
    share, parts = EvaluationShare(0.0 if eval_path else fraction), (list[Made](), list[Made]())
    for file, key, is_whole in ((path, "data.path", False), (eval_path, "data.eval_path", True)):
        if file is None and is_whole:
            continue
        place = file or "Python"
        try:
            for place, row in _read(Path(file).expanduser()) if file is not None else _numbered(own()):
                parts[is_whole or share.takes(len(str(row)))].append(make(place, row))
        except (OSError, ValueError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError.of(
                "rows-not-read", f"{place}: {reason}", "mend it, or name another", key, file
            ) from error
    return parts


def _numbered(rows: Iterator[Row]) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def _read(file: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file with their places."""
    with file.open(encoding="utf-8", newline="" if file.suffix == ".csv" else None) as stream:
        if file.suffix == ".csv":
            table = csv.DictReader(stream)
            for row in table:
                yield f"{file}:{table.line_num}", row
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    raise ValueError(f"line {number} is no JSON") from None
                if not isinstance(found, dict):
                    raise ValueError(f"line {number} is no object")
                yield f"{file}:{number}", found


def sentences() -> Iterator[Row]:
    """First sentences of what modules of the standard library document, and the module's name, by turns."""
    columns = [[(module, text) for _, text, _ in _documented(module)] for module in DOCUMENTED]
    for number in range(max(map(len, columns))):
        for column in columns:
            if number < len(column):
                yield dict(zip(("label", "text"), column[number], strict=True))


def questions() -> Iterator[Row]:
    """Conversations about the functions of the standard library: what one does, and how it is called."""
    for module in DOCUMENTED:
        for name, text, called in _documented(module):
            messages = [("user", f"What does {name} do?"), ("assistant", text)]
            messages += [("user", "How is it called?"), ("assistant", called)] if called else []
            yield {"messages": [{"role": role, "content": content} for role, content in messages]}


def _documented(module: str) -> Iterator[tuple[str, str, str]]:
    """Name, first sentence and call of every function that a module documents, methods of its classes included."""
    found, seen = vars(importlib.import_module(module)), set[str]()
    for outer, thing in sorted(found.items()):
        inner = sorted(vars(thing).items()) if inspect.isclass(thing) and thing.__module__ == module else ()
        for name, one in ((outer, thing), *((f"{outer}.{name}", one) for name, one in inner)):
            if any(part.startswith("_") for part in name.split(".")) or not callable(one):
                continue
            text = " ".join((inspect.getdoc(one) or "").split())
            text = re.split(r"(?<=[.!?]) ", text, maxsplit=1)[0]
            if 12 <= len(text) <= _LONGEST and text not in seen:
                seen.add(text)
                yield f"{module}.{name}", text, _call(name, one)


def _call(name: str, one: Any) -> str:
    try:
        return f"{name}{inspect.signature(one)}"
    except (ValueError, TypeError):
        return ""
