"""Metrics in files: ``metrics.csv`` and ``metrics.jsonl``.

``metrics.csv``: one row per logged step, one column per metric, for spreadsheets and pandas.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from framework.system.files import open_own, replace_text
from framework.train.monitors.base import Point

_FIRST_COLUMNS = ("step", "epoch")
_Row = dict[str, str]


class CsvFile:
    """Keeps one row per step: what else is logged at the same step completes the row.

    A metric seen for the first time adds a column, for which the file is written anew. Only the last row is kept in
    memory. The file stays open: closing it would wait for a network's disk at every point.
    """

    name = "metrics.csv"

    def __init__(self, path: Path, *, from_step: int) -> None:
        self._path = path
        self._file: IO[bytes] = io.BytesIO()
        self._last: _Row = {}
        self._columns, rows = _read(path) if os.path.lexists(path) else (list(_FIRST_COLUMNS), [])
        self._write_all([row for row in rows if int(row["step"]) <= from_step])

    def write(self, point: Point) -> None:
        row = {"step": str(point.step), "epoch": f"{point.epoch:.6g}"}
        row |= {name: repr(float(value)) for name, value in point.metrics.items()}
        same_step = self._last.get("step") == row["step"]
        row = self._last | row if same_step else row
        new_columns = [name for name in row if name not in self._columns]
        found = self._path.stat()
        if new_columns or (found.st_ino, found.st_size) != (self._number, self._size):  # changed by others
            columns, rows = _read(self._path)
            self._columns = columns + [name for name in row if name not in columns]
            self._write_all([*(other for other in rows if other["step"] != row["step"]), row])
        else:
            self._append(row, at=self._last_starts_at if same_step else self._size)

    def close(self) -> None:
        self._file.close()

    def _append(self, row: _Row, *, at: int) -> None:
        self._file.seek(at)
        self._file.write(_lines(self._columns, [row]))
        self._file.truncate()
        self._file.flush()
        self._last, self._last_starts_at, self._size = row, at, self._file.tell()

    def _write_all(self, rows: Sequence[_Row]) -> None:
        header = _lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
        before = header + _lines(self._columns, rows[:-1])
        after = _lines(self._columns, rows[-1:])
        self._file.close()
        replace_text(self._path, (before + after).decode())
        self._file = open_own(self._path, "r+b")
        self._number = os.fstat(self._file.fileno()).st_ino
        self._last = rows[-1] if rows else {}
        self._last_starts_at, self._size = len(before), len(before) + len(after)


def _lines(columns: Sequence[str], rows: Iterable[_Row]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="").writerows(rows)
    return text.getvalue().encode()


def _read(path: Path) -> tuple[list[str], list[_Row]]:
    """Columns, and the rows that were written to the end: a kill may leave half a row behind, even one that reads
    well.
    """
    with open_own(path, "r", newline="") as stream:
        text = stream.read()
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    columns = next(lines, [])
    if "step" not in columns:
        return list(_FIRST_COLUMNS), []
    rows = [dict(zip(columns, line, strict=True)) for line in lines if len(line) == len(columns)]
    return columns, [row for row in rows if row["step"].isascii() and row["step"].isdigit()]


# ``metrics.jsonl``: one JSON object per logged point; the record that reports and resumed runs read.


class JsonlFile:
    """Appends points to a file; a resumed run first drops the points after the step it starts from.

    JSON has no NaN and no infinity: such a value is written as null.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, *, from_step: int) -> None:
        if os.path.lexists(path):
            replace_text(path, "".join(line for line, step in _whole_lines(path) if step <= from_step))
        self._file = open_own(path, "a")

    def write(self, point: Point) -> None:
        record = {"step": point.step, "epoch": round(point.epoch, 6), "time": round(point.time_seconds, 3)}
        metrics = {name: value if math.isfinite(value) else None for name, value in point.metrics.items()}
        self._file.write(json.dumps(record | metrics, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Lines that were written to the end, and their steps; a kill or a power cut may leave half a line behind."""
    with open_own(path, "r") as stream:
        text = stream.read()
    for line in text.split("\n")[:-1]:
        try:
            yield line + "\n", int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
