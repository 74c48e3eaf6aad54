"""Profiled steps of a run: what its ranks have measured, as a timeline and as tables of the
page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from framework.report.chart import Chart
from framework.report.figures import PHASE_NAMES, number, size
from framework.report.timeline_chart import timeline_chart

# Errors of reading values from a file that is damaged or has another form.
_DAMAGED: Final = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_MOST_INTERVALS: Final = 3000
_MOST_ROWS: Final = 60

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, columns and rows."""


def timeline_of(ranks: Sequence[Mapping[str, Any]], *, slug: str, run: str) -> Chart | None:
    """Draw the last step that all ranks have traced, a row for each rank; None if there is no such
    step. `slug` is the name of its file, and its title begins with `run`.
    """
    try:
        rows, step = _timeline(ranks)
    except _DAMAGED:
        return None
    title = f"{run}Where the time of step {step} goes, by rank and micro-batch"
    if rows:
        return timeline_chart(slug, title, rows)
    return None


def _timeline(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, list[Any]]], int]:
    """Return the rows of the last step that all ranks have traced, and the step."""
    if not ranks:
        return [], 0
    steps = set.intersection(*(set(rank.get("steps", ())) for rank in ranks))
    if not steps:
        return [], 0
    step = max(steps)
    rows = []
    for rank in ranks:
        label = f"rank {rank['rank']}"
        if any(other["stage"] for other in ranks):
            label += f", stage {rank['stage']}"
        rows.append((label, _bars(rank, step, most=_MOST_INTERVALS // len(ranks))))
    return rows, step


def _bars(rank: Mapping[str, Any], step: int, *, most: int) -> list[Any]:
    """Return the first `most` parts of a rank's step: begin in ms of Unix time, length in ms, name
    and micro-batch, as `report/timeline_chart.py` takes them.
    """
    began = 1000.0 * rank["began_seconds"]
    parts = [part for part in rank["timeline"] if part["step"] == step]
    bars = []
    for part in parts[:most]:
        phase = PHASE_NAMES.get(part["phase"], part["phase"])
        bars.append((began + part["at_ms"], part["ms"], phase, part["micro_batch"]))
    return bars


def tables_of(ranks: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Make the tables of the profiled steps: of rank 0, and the modules of every stage."""
    if not ranks:
        return []
    try:
        return list(_tables(ranks))
    except _DAMAGED:
        return [("Damaged", ["file"], [["profile/tables*.json"]])]


def _module_tables(ranks: Sequence[Mapping[str, Any]], measured: Any) -> Iterator[Table]:
    """Yield the modules of each stage, as its first rank has measured them."""
    columns = ["module", "kind", "time", "FLOPs", "parameters", "kept for backward"]
    stages = []
    for rank in ranks:
        rows = _module_rows(rank)
        if rows and rank["stage"] not in stages:
            where = f"rank {rank['rank']}, stage {rank['stage']}, step {measured}"
            yield f"Modules, per forward pass ({where})", columns, rows
        stages.append(rank["stage"])


def _tables(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield the tables that have rows: operations, communication and timers of rank 0, and modules
    of each stage.
    """
    first = ranks[0]
    steps = ", ".join(map(str, first.get("steps", ())))
    measured = first.get("measured_step")
    rows = _rows(first.get("operations"), name=str, place=str, count=number, ms=_ms)
    if rows:
        title = f"Operations by their own time, per step (rank 0, steps {steps})"
        yield title, ["operation", "where", "calls", "time"], rows
    for name, title in (
        ("collectives", f"Sent, per step (steps {steps})"),
        ("communication", _LOGGED.format(measured)),
    ):
        rows = _rows(
            first.get(name), name=str, count=number, bytes=size, ms=_ms, bytes_per_second=_rate
        )
        if rows:
            yield f"{title}, rank 0", ["kind", "count", "bytes", "time", "bandwidth"], rows
    yield from _module_tables(ranks, measured)
    timers = first.get("timers")
    if timers:
        rows = [[name, _ms(value)] for name, value in timers.items()]
        yield f"DeepSpeed's timers (rank 0, step {measured})", ["timer", "time"], rows


def _module_rows(rank: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the outermost modules of a rank, in the model's order."""
    modules = rank.get("modules", ())
    outermost = sorted(modules, key=lambda row: row["depth"])[:_MOST_ROWS]
    shown = [row for row in modules if row in outermost]
    rows = _rows(shown, name=str, kind=str, ms=_ms, flops=number, params=number, kept_bytes=size)
    for row in rows:
        row[0] = row[0] or "(all)"
    return rows


_LOGGED: Final = "Sent by DeepSpeed, which waits for each (step {})"


def _rows(entries: Any, **columns: Callable[[Any], str]) -> list[list[str]]:
    """Return a row for each entry; `columns` are key of the entry -> function that writes its
    value. A value that is missing is "unknown".
    """
    rows = []
    for entry in entries or ():
        row = []
        for name, show in columns.items():
            row.append("unknown" if entry.get(name) is None else show(entry[name]))
        rows.append(row)
    return rows


def _ms(value: float) -> str:
    return f"{value:,.3f} ms"


def _rate(value: float) -> str:
    return f"{size(value)}/s"
