"""The file of predictions: JSON lines, CSV or arrays, a row for every input in order."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from framework.errors import ConfigError, StorageError, in_one_line

Row = Mapping[str, Any]
SUFFIXES: Final = (".jsonl", ".csv", ".npz")
# Arrays are written whole, every time.
_SECONDS_BETWEEN_ARRAYS: Final = 60.0


class Results:
    """Rows that are written in order, behind the `num_rows` that a command which was broken off has left."""

    def __init__(self, path: Path, *, inputs: Sequence[str], checkpoint: str) -> None:
        """Read what is there; a row that was cut off is dropped.

        Raises:
            ConfigError: kind ``predictions-of-others``: what is there is of other inputs or another checkpoint.
            StorageError: kind ``predictions-not-written``.
        """
        self._path, self._checkpoint, self._written_at = path, checkpoint, time.monotonic()
        self._rows: list[Row] = []  # where they are arrays: all of them
        self._columns: list[str] = []  # of a table
        try:
            found = self._read() if path.exists() else []
            pairs = [(row["input"], row["checkpoint"]) for row in found]
        except Exception as error:  # a damaged archive fails in a dozen ways
            raise self._not_written(error) from error
        for number, pair in enumerate(pairs):
            here = (inputs[number] if number < len(inputs) else "", checkpoint)
            if tuple(map(str, pair)) != here:
                reason = f"its row {number + 1} is of {pair[0]} by {pair[1]}, and not of {here[0]} by {here[1]}"
                fix = "name another file, or delete it"
                raise ConfigError.of("predictions-of-others", reason, fix, "--out", str(path))
        self.num_rows = len(pairs)

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows; a StorageError where that fails."""
        rows = [{"input": row["input"], "checkpoint": self._checkpoint, **row} for row in rows]
        self.num_rows += len(rows)
        if self._path.suffix != ".npz":
            try:
                with self._path.open("a", encoding="utf-8", newline="") as file:
                    file.write("".join(map(self._line, rows)))
            except (OSError, ValueError) as error:
                raise self._not_written(error) from error
            return
        self._rows += rows
        if time.monotonic() - self._written_at > _SECONDS_BETWEEN_ARRAYS:
            self.flush()

    def flush(self) -> None:
        """Write arrays; rows of other forms are written already."""
        if not self._rows:
            return
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp.npz")
        try:
            columns: dict[str, Any] = {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}
            np.savez(aside, **columns)
            aside.replace(self._path)
        except (OSError, ValueError) as error:  # rows of different shapes are no array
            aside.unlink(missing_ok=True)
            raise self._not_written(error) from error
        self._written_at = time.monotonic()

    def _read(self) -> list[Any]:
        if self._path.suffix == ".npz":
            columns = dict(np.load(self._path, allow_pickle=False))
            self._rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            return self._rows
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.truncate(self._path, len(whole))
        if self._path.suffix == ".jsonl":
            return [json.loads(line) for line in whole.splitlines()]
        reader = csv.DictReader(io.StringIO(whole.decode()))
        self._columns = list(reader.fieldnames or ())
        return list(reader)

    def _line(self, row: Row) -> str:
        if self._path.suffix == ".jsonl":
            return json.dumps(row, ensure_ascii=False) + "\n"
        cells = {key: cell for name, value in row.items() for key, cell in _cells(name, value)}
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns or list(cells), lineterminator="\n")
        if not self._columns:
            self._columns = list(cells)
            writer.writeheader()
        writer.writerow(cells)
        return text.getvalue()

    def _not_written(self, error: Exception) -> StorageError:
        reason = f"it cannot be read or written: {in_one_line(error)}"
        return StorageError(f"--out = {self._path}: {reason}; name another file [predictions-not-written]")


def _cells(name: str, value: Any) -> list[tuple[str, Any]]:
    """A list as a cell for each of its items; a text of several lines as JSON, so that a row is one line."""
    if isinstance(value, list):
        return [cell for number, item in enumerate(value) for cell in _cells(f"{name}_{number}", item)]
    return [(name, json.dumps(value, ensure_ascii=False) if isinstance(value, str) and "\n" in value else value)]
