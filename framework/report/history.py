"""`RunResult.history`: every logged value of a run, out of ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from framework.report.run_lines import POINT, metrics_of
from framework.system.files import open_own


@dataclass(frozen=True)
class History:
    """Values of one metric, and the steps after which they were logged, in order; NaN where one was
    not finite.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_history(folder: Path) -> Mapping[str, History]:
    """Return the history of every metric of a run folder, by name; of two points at one step the
    later line counts. Empty on a host that does not have the folder.
    """
    points: dict[str, dict[int, float]] = {}
    try:
        with open_own(folder / "metrics.jsonl", "rb") as stream:
            for line in stream:
                _add(line, points)
    except OSError:
        return {}
    history = {}
    for name, values in points.items():
        steps = sorted(values)
        history[name] = History(steps, [values[step] for step in steps])
    return history


def _add(line: bytes, points: dict[str, dict[int, float]]) -> None:
    """Add the metrics of a line to name -> step -> value; a damaged line is left out."""
    try:
        point = POINT.validate_python(json.loads(line))
    except (ValueError, RecursionError):
        return
    for name, value in metrics_of(point):
        points.setdefault(name, {})[point["step"]] = value
