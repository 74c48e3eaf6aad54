"""Charts of a report: which there are, and what each shows of which run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from framework.report.draw import Chart, Line, Mark, area_chart, bar_chart, line_chart
from framework.report.figures import PHASE_NAMES, duration, means, number, size, time_split
from framework.report.goodput import goodput
from framework.report.profile import timeline_of
from framework.report.records import RunRecords
from framework.report.series import Series
from framework.report.verdict import PHASES

# Metrics with a chart of their own: name -> title, unit on the axis.
_CURVES: Final[Mapping[str, tuple[str, str]]] = {
    "train/lr": ("Learning rate", "learning rate"),
    "train/grad_norm": ("Gradient norm", "L2 norm before clipping"),
}
_RATES: Final[Mapping[str, tuple[str, str, float]]] = {
    "throughput/tokens_per_sec": ("Throughput in tokens", "tokens/s", 1.0),
    "throughput/samples_per_sec": ("Throughput in samples", "samples/s", 1.0),
    "throughput/tflops": ("Arithmetic per device", "TFLOP/s", 1.0),
    "throughput/mfu": ("Model FLOPs utilization (MFU)", "% of peak", 100.0),
    "time/step_ms": ("Time of a step", "ms", 1.0),
}
_SHOWN_ELSEWHERE: Final = ("time/", "memory/", "eval/")
_MOST_OTHERS: Final = 24


def charts_of(runs: Sequence[RunRecords]) -> dict[str, list[Chart]]:
    """Draw all charts, by section of the page; a section without a chart is left out."""
    sections = {
        "Curves": [*_loss(runs), *_curves(runs), *_evaluations(runs)],
        "Speed": [*_rates(runs), *_split(runs)],
        "Timeline": [*_timelines(runs)],
        "Memory": [*_memory(runs)],
        "Goodput": [*_goodput(runs)],
        "Other metrics": [*_others(runs)],
    }
    return {name: charts for name, charts in sections.items() if charts}


def _lines(
    runs: Sequence[RunRecords], metric: str, *, factor: float = 1.0, shows_points: bool = False
) -> list[Line]:
    return [
        Line(run.name, _scaled(run.metrics[metric], factor), style, shows_points)
        for style, run in enumerate(runs)
        if metric in run.metrics
    ]


def _scaled(series: Series, factor: float) -> Series:
    if factor == 1:
        return series
    return Series(series.steps, [factor * value for value in series.values])


def marks_of(run: RunRecords) -> list[Mark]:
    """List checkpoints, skipped steps and restarts of a run; without events, of what its metrics
    and folder hold.
    """
    saved = {event["step"] for event in run.happened("save") if "step" in event} or set(
        run.saved_steps
    )
    marks = [Mark("save", step) for step in sorted(saved)]
    marks += [Mark("restart", event.get("step", 0)) for event in run.happened("resume")]
    marks += [Mark("back", event.get("step", 0)) for event in run.happened("roll_back")]
    skipped = run.metrics.get("train/skipped_steps", Series()).finite
    before = 0.0
    for step, value in skipped:
        marks += [Mark("skip", step)] if value > before else []
        before = value
    if not skipped:
        marks += [Mark("skip", event["step"]) for event in run.happened("skip") if "step" in event]
    return marks


def _loss(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    lines = []
    several = len(runs) > 1
    for style, run in enumerate(runs):
        losses = [
            name
            for name in ("train/loss", *_names([run], "eval/"))
            if name in run.metrics and _is_loss(name)
        ]
        # Of one run, a colour each; of several, each its own, and evaluations as points of it.
        lines += [
            Line(
                f"{run.name} {name}" if several else name,
                run.metrics[name],
                style if several else number,
                name != "train/loss",
            )
            for number, name in enumerate(losses)
        ]
    if several:
        marks = []
    else:
        marks = marks_of(runs[0])
    for run in runs:
        loss = run.metrics.get("train/loss", Series())
        marks += [
            Mark("nan", s) for s, v in zip(loss.steps, loss.values, strict=True) if not isfinite(v)
        ]
    chart = line_chart("loss", "Loss", "loss", lines, marks=marks, has_wide=True)
    if chart:
        yield chart


def _is_loss(name: str) -> bool:
    return name.endswith("/loss")


def _curves(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    for name, (title, unit) in _CURVES.items():
        if len(runs) == 1:
            marks = [mark for mark in marks_of(runs[0]) if mark.kind == "skip"]
        else:
            marks = []
        is_log = False if name == "train/lr" else None
        chart = line_chart(
            name.replace("/", "-"), title, unit, _lines(runs, name), marks=marks, is_log=is_log
        )
        if chart:
            yield chart


def _evaluations(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    names = [name for name in _names(runs, "eval/") if not _is_loss(name)]
    for index, name in enumerate(names[:_MOST_OTHERS]):
        lines = _lines(runs, name, shows_points=True)
        chart = line_chart(
            f"evaluation-{index}", f"Evaluation: {name.removeprefix('eval/')}", name, lines
        )
        if chart:
            yield chart


def _rates(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    has_tokens = all("throughput/tokens_per_sec" in run.metrics for run in runs)
    for name, (title, unit, factor) in _RATES.items():
        if has_tokens and name == "throughput/samples_per_sec":
            continue  # the same curve in another unit
        lines = _lines(runs, name, factor=factor)
        if name == "time/step_ms" and len(runs) == 1:
            planned = _planned_step(runs[0])
        else:
            planned = None
        chart = line_chart(
            name.replace("/", "-"), title, unit, lines, from_zero=True, reference=planned
        )
        if chart:
            yield chart


def _planned_step(run: RunRecords) -> tuple[str, float] | None:
    """Time of a step that the plan has estimated, in milliseconds."""
    compared = run.section("measured").get("step_seconds")
    if isinstance(compared, Mapping):
        seconds = compared.get("estimate")
    else:
        seconds = run.section("time").get("step_seconds")
    if isinstance(seconds, int | float) and 0 < seconds < 1e9:
        return ("plan", 1000.0 * seconds)
    return None


def step_bars(splits: Sequence[tuple[str, Mapping[str, float]]]) -> Chart | None:
    """Draw the parts of a mean step, in milliseconds, as a bar for each name."""
    bars = [(name, list(_named(split).items())) for name, split in splits if split]

    def milliseconds(value: float) -> str:
        return f"{number(value)} ms"

    return bar_chart(
        "step-parts", "Where the time of a mean step goes", "ms per step", bars, show=milliseconds
    )


def _split(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    chart = step_bars([(run.name, time_split(means(run))) for run in runs])
    if chart:
        yield chart
    if len(runs) == 1:
        parts = _parts_over_time(runs[0])
    else:
        parts = []
    # Of waits for data and the rest alone, the curve of the whole shows as much.
    if len(parts) > 2 and (chart := area_chart("step-parts-over-time", *_OVER_TIME, parts)):
        yield chart


_OVER_TIME: Final = ("Parts of a step over the run", "ms per step")


def _named(split: Mapping[str, float]) -> dict[str, float]:
    return {PHASE_NAMES.get(phase, phase): value for phase, value in split.items()}


def _parts_over_time(run: RunRecords) -> list[tuple[str, Series]]:
    """Parts of a step at every logged point, and the rest of the step."""
    step = run.metrics.get("time/step_ms", Series())
    found = {
        phase: run.metrics[f"time/{phase}_ms"]
        for phase in PHASES
        if f"time/{phase}_ms" in run.metrics
    }
    at = {phase: dict(zip(each.steps, each.values, strict=True)) for phase, each in found.items()}
    parts = {
        phase: [values.get(step_, 0.0) for step_ in step.steps] for phase, values in at.items()
    }
    rest = [
        whole - sum(part[index] for part in parts.values() if isfinite(part[index]))
        for index, whole in enumerate(step.values)
    ]
    if sum(value for value in rest if isfinite(value)) > 0.02 * sum(
        value for value in step.values if isfinite(value)
    ):
        parts["not timed"] = rest
    return [
        (PHASE_NAMES.get(phase, phase), Series(step.steps, values))
        for phase, values in parts.items()
    ]


def _timelines(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    for index, run in enumerate(runs):
        if len(runs) > 1:
            name = f"{run.name}: "
        else:
            name = ""
        chart = timeline_of(run.profile, slug=f"timeline-{index}", run=name)
        if chart:
            yield chart


def _memory(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    gib = 1.0 / (1 << 30)
    bars = []
    for run in runs:
        if len(runs) > 1:
            prefix = f"{run.name}: "
        else:
            prefix = ""
        bars += [(f"{prefix}{label}", parts) for label, parts in _memory_bars(run)]
    title = "Peak memory of a device: plan and run"
    chart = bar_chart("memory-plan", title, "GiB", bars, show=size, shown_unit=1 << 30)
    if chart:
        yield chart
    for index, name in enumerate(_names(runs, "memory/")[:_MOST_OTHERS]):
        where = name.removeprefix("memory/").removesuffix("_bytes").replace("_", " ")
        lines = _lines(runs, name, factor=gib if name.endswith("_bytes") else 1.0)
        if name.endswith("_bytes"):
            unit = "GiB"
        else:
            unit = name
        if len(runs) == 1 and name == "memory/device_peak_bytes":
            known = plan_peak(runs[0])
        else:
            known = None
        reference = ("plan", known * gib) if known else None
        chart = line_chart(
            f"memory-{index}", f"Memory: {where}", unit, lines, from_zero=True, reference=reference
        )
        if chart:
            yield chart


def _memory_bars(run: RunRecords) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Estimate of the plan by component where it has that, and what was measured. A process on a
    host holds libraries as well, which no plan counts.
    """
    memory = run.section("memory")
    by_moment = memory.get("bytes")
    if isinstance(by_moment, Mapping):
        components = by_moment.get(memory.get("peak"))
    else:
        components = None
    if isinstance(components, Mapping) and (parts := _positive(components)):
        yield "plan", parts
    elif (known := plan_peak(run)) is not None:
        yield "plan", [("estimate", known)]
    points = run.metrics.get("memory/device_peak_bytes", Series()).finite
    if points:
        yield "measured", [("measured peak", max(value for _, value in points))]


def plan_peak(run: RunRecords) -> float | None:
    """Peak of a device that the plan has estimated, in bytes; None where it has not."""
    memory = run.section("memory")
    compared = run.section("measured").get("device_peak_bytes")
    totals = memory.get("total_bytes")
    peak = memory.get("peak")
    if isinstance(totals, Mapping):
        known = totals.get(peak)
    else:
        known = None
    if known is None and isinstance(compared, Mapping):
        known = compared.get("estimate")
    if isinstance(known, int | float) and isfinite(known) and known > 0:
        return float(known)
    return None


def _positive(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (str(name).replace("_", " "), float(value))
        for name, value in values.items()
        if isinstance(value, int | float) and isfinite(value) and value > 0
    ]


def _goodput(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    found = [
        (run.name, list(each.parts.items())) for run in runs if (each := goodput(run)) is not None
    ]
    longest = max((sum(value for _, value in parts) for _, parts in found), default=0.0)
    unit, divisor = (
        ("h", 3600.0) if longest > 7200 else ("min", 60.0) if longest > 120 else ("s", 1.0)
    )
    title = "What the time of the run was spent on"
    chart = bar_chart("goodput", title, unit, found, show=duration, shown_unit=divisor)
    if chart:
        yield chart


def _others(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    drawn = {"train/loss", *_CURVES, *_RATES}
    names = [
        name
        for name in _names(runs, "")
        if name not in drawn and not name.startswith(_SHOWN_ELSEWHERE)
    ]
    for index, name in enumerate(names[:_MOST_OTHERS]):
        is_used = any(value for run in runs for _, value in run.metrics.get(name, Series()).finite)
        chart = line_chart(f"other-{index}", name, name.rpartition("/")[2], _lines(runs, name))
        if is_used and chart:
            yield chart


def _names(runs: Sequence[RunRecords], prefix: str) -> list[str]:
    return sorted({name for run in runs for name in run.metrics if name.startswith(prefix)})
