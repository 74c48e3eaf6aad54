"""Rows of text for training and evaluation: of files, or of the documentation of Python's own
library, which is on every machine and differs between versions.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Make the samples of training and evaluation.

    Args:
        paths: of training (None: the rows of `own`) and of evaluation (None: a share of the
            training rows, by `fraction`); ``.csv``, otherwise JSON lines.
        fraction: 0 for no evaluation.
        make: makes a sample from its place, ``file:line``, and its row. Raises `ValueError` with
            the fault of the row.
        own: yields rows without a file.

    Raises:
        ConfigError: kind ``rows-not-read``.
    """
    share = EvaluationShare(0.0 if paths[1] else fraction)
    training: list[Made] = []
    evaluation: list[Made] = []
    for key, path in zip(("data.path", "data.eval_path"), paths, strict=True):
        is_training = key == "data.path"
        place: Any = path
        rows: Iterable[tuple[Any, Row]] = ()
        try:
            if path:
                rows = read_rows(Path(path).expanduser())
            elif is_training:
                rows = enumerate(own())
            for place, row in rows:
                part = evaluation
                if is_training and not share.takes(len(str(row))):
                    part = training
                part.append(make(str(place), row))
        except (OSError, ValueError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            fix = "repair it, or name another"
            raise ConfigError.of("rows-not-read", f"{place}: {reason}", fix, key, path) from error
    return training, evaluation


def read_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file with their places, ``file:line``; empty lines and ``null`` are left
    out.

    Raises:
        OSError, ValueError, csv.Error: it cannot be read, or a line is no JSON object.
    """
    with file.open(encoding="utf-8", newline="") as stream:
        if file.suffix == ".csv":
            table = csv.DictReader(stream)
            for row in table:
                yield f"{file}:{table.line_num}", row
            return
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = ()
            if value is None:
                continue
            if not isinstance(value, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield f"{file}:{number}", value


def sentences() -> Iterator[Row]:
    """Yield the first sentences of functions' documentation, labelled by their modules."""
    for module in DOCUMENTED:
        for _, text, _ in _functions_of(module):
            yield {"text": text, "label": module}


def questions() -> Iterator[Row]:
    """Yield conversations about the purpose of a function, and how it is called."""
    for module in DOCUMENTED:
        for name, text, call in _functions_of(module):
            messages = [
                {"role": "user", "content": f"What does {name} do?"},
                {"role": "assistant", "content": text},
            ]
            if call:
                messages.append({"role": "user", "content": "How is it called?"})
                messages.append({"role": "assistant", "content": call})
            yield {"messages": messages}


def _functions_of(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, first sentence and call of the documented functions of a module; the call is
    empty if it is not known.
    """
    seen: set[str] = set()
    for name, value in _members(module):
        if re.search(r"(^|\.)_", name) or not callable(value):
            continue
        documentation = " ".join((inspect.getdoc(value) or "").split())
        text = re.split(r"(?<=[.!?]) ", documentation, maxsplit=1)[0]
        if 12 <= len(text) <= 300 and text not in seen:
            seen.add(text)
            call = ""
            with suppress(ValueError, TypeError):
                call = f"{module}.{name}{inspect.signature(value)}"
            # An object among the defaults is shown with its address, which differs between
            # processes.
            if " at 0x" in call:
                call = ""
            yield f"{module}.{name}", text, call


def _members(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the names in a module and their values, followed by the members of its own classes."""
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        yield name, value
        if inspect.isclass(value) and value.__module__ == module:
            for inner_name, inner in sorted(vars(value).items()):
                yield f"{name}.{inner_name}", inner
