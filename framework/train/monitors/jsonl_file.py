"""``metrics.jsonl``: one JSON object per logged point; the record that reports and resumed runs read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from framework.system.files import open_own, replace_text
from framework.train.monitors.base import Point


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
