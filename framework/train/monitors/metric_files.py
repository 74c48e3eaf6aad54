"""Metrics in files: ``metrics.csv`` and ``metrics.jsonl``.

``metrics.csv``: one row per logged step, one column per metric, for spreadsheets and pandas.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from framework.system.files import open_own, replace_text
from framework.system.kept_file import KeptFile, Troubles, write_all
from framework.train.monitors.base import Point

_FIRST_COLUMNS = ("step", "epoch")
_MOST_UNWRITTEN = 10_000
_Row = dict[str, str]


class CsvFile:
    """Keeps one row per step: further points of the same step complete the row.

    A new metric adds a column, for which the file is written anew. Only the last row is kept in
    memory, and the rows that storage refused. The file stays open: closing it would wait for a
    network's disk at every point.
    """

    name = "metrics.csv"

    def __init__(
        self, path: Path, *, from_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._file: IO[bytes] = io.BytesIO()
        self._last: _Row = {}
        self._unwritten: dict[str, _Row] = {}  # by step, in order
        self._troubles = Troubles(self.name, kind="monitor-failed", clock=clock)
        self._columns, rows = _read(path)
        self._write_all([row for row in rows if int(row["step"]) <= from_step])

    def write(self, point: Point) -> None:
        """Take a point; while storage refuses rows, up to 10,000 of them wait in memory."""
        step = str(point.step)
        row = {"step": step, "epoch": f"{point.epoch:.6g}"}
        for name, value in point.metrics.items():
            row[name] = repr(float(value))
        if self._last.get("step") == step:
            row_so_far = self._last
        else:
            row_so_far = self._unwritten.get(step, {})
        self._unwritten[step] = row_so_far | row
        if not self._troubles.is_waiting:
            self._try_to_write()
        while len(self._unwritten) > _MOST_UNWRITTEN:
            self._lose_oldest()

    def close(self) -> None:
        """Try for the last time, and warn of missing rows."""
        if self._troubles.is_open:
            self._try_to_write()
        while self._unwritten:
            self._lose_oldest()
        self._troubles.close()
        self._file.close()

    def _lose_oldest(self) -> None:
        step = next(iter(self._unwritten))
        del self._unwritten[step]
        self._troubles.lose(int(step))

    def _try_to_write(self) -> None:
        try:
            self._write_unwritten()
        except OSError as error:
            self._inode = -1  # the file is read before it is written again
            self._troubles.failed(error)
        else:
            self._unwritten.clear()
            self._troubles.worked()

    def _write_unwritten(self) -> None:
        """Write the rows that are not written yet: one at the end, or over the last row if that has
        its step; several, or a new column, by writing the whole file anew. OSError if that fails.
        """
        rows = list(self._unwritten.values())
        has_new_column = any(name not in self._columns for name in rows[-1])
        if len(rows) > 1 or has_new_column or self._is_changed():
            self._columns, written = _read(self._path)
            for row in rows:
                for name in row:
                    if name not in self._columns:
                        self._columns.append(name)
            others = [row for row in written if row["step"] not in self._unwritten]
            self._write_all(others + rows)
        elif self._last.get("step") == rows[0]["step"]:
            self._append(rows[0], at=self._last_starts_at)
        else:
            self._append(rows[0], at=self._size)

    def _is_changed(self) -> bool:
        """Check whether an attempt has failed, or others have written to the file or removed it."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return True
        return status.st_ino != self._inode or status.st_size != self._size

    def _append(self, row: _Row, *, at: int) -> None:
        """Write a row at byte `at`, and cut off what comes after it; after a failure the file ends
        at `at`.
        """
        descriptor = self._file.fileno()
        line = _lines(self._columns, [row])
        try:
            os.lseek(descriptor, at, os.SEEK_SET)
            write_all(descriptor, line)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, at)
            raise
        os.ftruncate(descriptor, at + len(line))
        self._last = row
        self._last_starts_at = at
        self._size = at + len(line)

    def _write_all(self, rows: Sequence[_Row]) -> None:
        """Put a new file with these rows in the place of the old one, and open it."""
        header = _lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
        before = header + _lines(self._columns, rows[:-1])
        after = _lines(self._columns, rows[-1:])
        replace_text(self._path, (before + after).decode())
        self._file.close()
        self._file = open_own(self._path, "r+b")
        self._inode = os.fstat(self._file.fileno()).st_ino
        self._last = rows[-1] if rows else {}
        self._last_starts_at = len(before)
        self._size = len(before) + len(after)


def _lines(columns: Sequence[str], rows: Iterable[_Row]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="").writerows(rows)
    return text.getvalue().encode()


def _read(path: Path) -> tuple[list[str], list[_Row]]:
    """Return the columns and the complete rows of a file.

    A kill may leave half a row behind, even one that can be parsed.
    """
    if not os.path.lexists(path):
        return list(_FIRST_COLUMNS), []
    with open_own(path, "r", newline="") as stream:
        text = stream.read()
    complete_lines = text[: text.rfind("\n") + 1]
    lines = csv.reader(io.StringIO(complete_lines, newline=""))
    columns = next(lines, [])
    if "step" not in columns:
        return list(_FIRST_COLUMNS), []
    rows: list[_Row] = []
    for line in lines:
        if len(line) == len(columns):
            row = dict(zip(columns, line, strict=True))
            if row["step"].isascii() and row["step"].isdigit():
                rows.append(row)
    return columns, rows


# ``metrics.jsonl``: one JSON object per logged point; the record that reports and resumed runs
# read.


class JsonlFile:
    """Appends points to a file; a resumed run first drops the points after the step it starts from.

    JSON has no NaN and no infinity: such a value is written as null.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, *, from_step: int) -> None:
        if os.path.lexists(path):
            kept_lines = [line for line, step in _complete_lines(path) if step <= from_step]
            replace_text(path, "".join(kept_lines))
        self._file = KeptFile(path, name=self.name)

    def write(self, point: Point) -> None:
        record = {
            "step": point.step,
            "epoch": round(point.epoch, 6),
            "time": round(point.time_seconds, 3),
        }
        metrics: dict[str, float | None] = {}
        for name, value in point.metrics.items():
            metrics[name] = value if math.isfinite(value) else None
        line = json.dumps(record | metrics, allow_nan=False) + "\n"
        self._file.append(line.encode(), step=point.step)

    def close(self) -> None:
        self._file.close()


def _complete_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the complete lines and their steps; a kill or a power cut may leave half a line
    behind.
    """
    with open_own(path, "r") as stream:
        text = stream.read()
    for line in text.split("\n")[:-1]:
        try:
            yield line + "\n", int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
