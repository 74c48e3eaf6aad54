"""Charts of a report: their selection, and what each of them shows of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any, Final, TypeVar

from framework.report.area_chart import area_chart
from framework.report.bar_chart import bar_chart
from framework.report.chart import Chart
from framework.report.figures import (
    PHASE_NAMES,
    byte_unit,
    duration,
    flops_unit,
    means,
    number,
    size,
    time_split,
)
from framework.report.goodput import goodput
from framework.report.line_chart import Line, Mark, line_chart
from framework.report.profile import timeline_of
from framework.report.records import RunRecords
from framework.report.series import Series
from framework.system.metric_names import PHASES, time_of

# Metrics with a chart of their own: name -> title, unit on the axis.
_CURVES: Final[Mapping[str, tuple[str, str]]] = {
    "train/lr": ("Learning rate", "learning rate"),
    "train/grad_norm": ("Gradient norm", "L2 norm before clipping"),
}
_RATES: Final[Mapping[str, tuple[str, str, float]]] = {
    "throughput/tokens_per_sec": ("Throughput in tokens", "tokens/s", 1.0),
    "throughput/samples_per_sec": ("Throughput in samples", "samples/s", 1.0),
    "throughput/tflops": ("Arithmetic per device", "TFLOP/s", 1.0),  # or a smaller unit
    "throughput/mfu": ("Model FLOPs utilization (MFU)", "% of peak", 100.0),
    "time/step_ms": ("Time of a step", "ms", 1.0),
}
_SHOWN_ELSEWHERE: Final = ("time/", "memory/", "eval/")
_MOST_OTHERS: Final = 24


def charts_of(runs: Sequence[RunRecords]) -> dict[str, list[Chart]]:
    """Draw all charts, by section of the page; a section without a chart is left out."""
    charts_by_section = {
        "Curves": chain(_loss(runs), _curves(runs), _evaluations(runs)),
        "Speed": chain(_rates(runs), _split(runs)),
        "Timeline": _timelines(runs),
        "Memory": _memory(runs),
        "Goodput": _goodput(runs),
        "Other metrics": _others(runs),
    }
    sections = {}
    for name, charts in charts_by_section.items():
        drawn = list(filter(None, charts))
        if drawn:
            sections[name] = drawn
    return sections


def _lines(
    runs: Sequence[RunRecords], metric: str, *, factor: float = 1.0, shows_points: bool = False
) -> list[Line]:
    lines = []
    for style, run in enumerate(runs):
        if metric in run.metrics:
            series = _scaled(run.metrics[metric], factor)
            lines.append(Line(run.name, series, style, shows_points))
    return lines


def _scaled(series: Series, factor: float) -> Series:
    if factor == 1:
        return series
    return Series(series.steps, [factor * value for value in series.values])


def marks_of(run: RunRecords) -> list[Mark]:
    """List checkpoints, skipped steps and restarts of a run; without events, of what its metrics
    and folder hold.
    """
    saved = _steps_of(run, "save") or run.saved_steps
    marks = [Mark("save", step) for step in sorted(set(saved))]
    marks += [Mark("restart", event.get("step", 0)) for event in run.happened("resume")]
    marks += [Mark("back", event.get("step", 0)) for event in run.happened("roll_back")]
    marks += [Mark("skip", step) for step in _skipped_steps(run)]
    return marks


def _skipped_steps(run: RunRecords) -> list[int]:
    """List the logged steps up to which the count of skipped ones has grown; without that metric,
    the steps of events.
    """
    skipped = run.metrics.get("train/skipped_steps", Series()).finite
    if not skipped:
        return _steps_of(run, "skip")
    steps = []
    before = 0.0
    for step, value in skipped:
        if value > before:
            steps.append(step)
        before = value
    return steps


def _steps_of(run: RunRecords, kind: str) -> list[int]:
    return [event["step"] for event in run.happened(kind) if "step" in event]


def _losses_of(run: RunRecords) -> list[str]:
    """List the losses that a run has measured, of training first."""
    names = [name for name in _names([run], "eval/") if _is_loss(name)]
    if "train/loss" in run.metrics:
        return ["train/loss", *names]
    return names


def _loss(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    lines: list[Line] = []
    marks: list[Mark] = []
    if len(runs) == 1:
        marks += marks_of(runs[0])
        # a colour for each loss
        for number, name in enumerate(_losses_of(runs[0])):
            lines.append(Line(name, runs[0].metrics[name], number, name != "train/loss"))
    else:
        # a colour for each run, with evaluations as points
        for number, run in enumerate(runs):
            for name in _losses_of(run):
                label = f"{run.name} {name}"
                lines.append(Line(label, run.metrics[name], number, name != "train/loss"))
    for run in runs:
        loss = run.metrics.get("train/loss", Series())
        for step, value in zip(loss.steps, loss.values, strict=True):
            if not isfinite(value):
                marks.append(Mark("nan", step))
    yield line_chart(
        "loss", "Loss", "loss", lines, marks=marks, has_wide=True, remark=_smoothing(runs)
    )


def _smoothing(runs: Sequence[RunRecords]) -> str:
    """Return why the losses of training and evaluation do not compare, if labels are smoothed."""
    for run in runs:
        share = run.setting("task", "label_smoothing")
        if isinstance(share, int | float) and share > 0:
            return (
                f"train/loss is of smoothed labels (task.label_smoothing: {share}) and stays "
                "above eval/loss, which is of the labels themselves."
            )
    return ""


def _is_loss(name: str) -> bool:
    return name.endswith("/loss")


def _curves(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    """Yield a chart of each metric in `_CURVES`, None for one that no run has a number of. Of a
    single run they show the skipped steps.
    """
    marks = []
    if len(runs) == 1:
        marks = [mark for mark in marks_of(runs[0]) if mark.kind == "skip"]
    for name, (title, unit) in _CURVES.items():
        # None: logarithmic if the values span a large range. A learning rate falls to zero as a
        # line or a cosine, which is seen on a linear axis only.
        is_log = False if name == "train/lr" else None
        slug = name.replace("/", "-")
        yield line_chart(slug, title, unit, _lines(runs, name), marks=marks, is_log=is_log)


def _evaluations(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    names = [name for name in _names(runs, "eval/") if not _is_loss(name)]
    for index, name in enumerate(names[:_MOST_OTHERS]):
        title = f"Evaluation: {name.removeprefix('eval/')}"
        lines = _lines(runs, name, shows_points=True)
        yield line_chart(f"evaluation-{index}", title, name, lines)


def _rates(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    has_tokens = all("throughput/tokens_per_sec" in run.metrics for run in runs)
    for name, (title, unit, factor) in _RATES.items():
        if has_tokens and name == "throughput/samples_per_sec":
            continue  # the same curve in another unit
        planned = None
        if name == "time/step_ms" and len(runs) == 1:
            planned = _planned_step(runs[0])
        if name == "throughput/tflops":
            unit, factor = flops_unit(_largest(runs, name))
        slug = name.replace("/", "-")
        lines = _lines(runs, name, factor=factor)
        yield line_chart(slug, title, unit, lines, from_zero=True, reference=planned)


def _largest(runs: Sequence[RunRecords], metric: str) -> float:
    """Return the largest finite value of a metric in any run; 0 without one."""
    largest = 0.0
    for run in runs:
        largest = max([largest, *run.metrics.get(metric, Series()).finite_values])
    return largest


def _planned_step(run: RunRecords) -> tuple[str, float] | None:
    """Return the time of a step that the plan has estimated, in milliseconds, with its name."""
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
    bars = [(name, list(_with_legend_names(split).items())) for name, split in splits if split]

    def milliseconds(value: float) -> str:
        return f"{number(value)} ms"

    return bar_chart(
        "step-parts", "Where the time of a mean step goes", "ms per step", bars, show=milliseconds
    )


def _split(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    yield step_bars([(run.name, time_split(means(run))) for run in runs])
    if len(runs) == 1:
        parts = _parts_over_time(runs[0])
        # With two parts, the wait for data and the rest, the curve of step times shows as much.
        if len(parts) > 2:
            yield area_chart("step-parts-over-time", *_OVER_TIME, parts)


# Title and unit of the chart of parts over the run.
_OVER_TIME: Final = ("Parts of a step over the run", "ms per step")
Value = TypeVar("Value")


def _with_legend_names(split: Mapping[str, Value]) -> dict[str, Value]:
    return {PHASE_NAMES.get(phase, phase): value for phase, value in split.items()}


def _parts_over_time(run: RunRecords) -> list[tuple[str, Series]]:
    """Return the parts of a step in ms at every logged point, and the rest of the step if it is
    more than what rounding leaves.
    """
    step_times = run.metrics.get("time/step_ms", Series())
    rest = list(step_times.values)
    parts: dict[str, list[float]] = {}
    for phase in PHASES:
        series = run.metrics.get(time_of(phase))
        if series is not None:
            times = dict(zip(series.steps, series.values, strict=True))
            parts[phase] = [times.get(step, 0.0) for step in step_times.steps]
    for index, step_time in enumerate(step_times.values):
        rest[index] = step_time - _finite_sum([values[index] for values in parts.values()])
    if _finite_sum(rest) > 0.02 * _finite_sum(step_times.values):
        parts["not timed"] = rest
    return [
        (name, Series(step_times.steps, values))
        for name, values in _with_legend_names(parts).items()
    ]


def _finite_sum(values: Sequence[float]) -> float:
    return sum(value for value in values if isfinite(value))


def _timelines(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    for index, run in enumerate(runs):
        yield timeline_of(run.profile, slug=f"timeline-{index}", run=_prefix(run, runs))


def _prefix(run: RunRecords, runs: Sequence[RunRecords]) -> str:
    if len(runs) > 1:
        return f"{run.name}: "
    return ""


def _memory(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    bars = []
    longest = 0.0
    for run in runs:
        for label, parts in _memory_bars(run):
            bars.append((_prefix(run, runs) + label, parts))
            longest = max(longest, sum(num_bytes for _, num_bytes in parts))
    title = "Peak memory of a device: plan and run"
    unit, divisor = byte_unit(longest)
    yield bar_chart("memory-plan", title, unit, bars, show=size, shown_unit=divisor)
    for index, name in enumerate(_names(runs, "memory/")[:_MOST_OTHERS]):
        factor = 1.0
        unit = name
        if name.endswith("_bytes"):
            unit, divisor = byte_unit(_largest(runs, name))
            factor = 1.0 / divisor
        where = name.removeprefix("memory/").removesuffix("_bytes").replace("_", " ")
        yield line_chart(
            f"memory-{index}",
            f"Memory: {where}",
            unit,
            _lines(runs, name, factor=factor),
            from_zero=True,
            reference=_planned_peak(runs, name, factor),
        )


def _planned_peak(runs: Sequence[RunRecords], name: str, factor: float) -> tuple[str, float] | None:
    """Return the peak that the plan of a single run gives, in the unit of the chart of `name`."""
    if len(runs) > 1 or name != "memory/device_peak_bytes":
        return None
    peak = plan_peak(runs[0])
    if peak is None:
        return None
    return "plan", peak * factor


def _memory_bars(run: RunRecords) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield the estimate of the plan, by component if it has them, and what was measured. A process
    on a host holds libraries as well, which no plan counts.
    """
    memory = run.section("memory")
    by_moment = memory.get("bytes")
    components = None
    if isinstance(by_moment, Mapping):
        components = by_moment.get(memory.get("peak"))
    parts = []
    if isinstance(components, Mapping):
        parts = _positive(components)
    peak = plan_peak(run)
    if not parts and peak is not None:
        parts = [("estimate", peak)]
    if parts:
        yield "plan", parts
    peaks = run.metrics.get("memory/device_peak_bytes", Series()).finite_values
    if peaks:
        yield "measured", [("measured peak", max(peaks))]


def plan_peak(run: RunRecords) -> float | None:
    """Return the peak of a device that the plan has estimated, in bytes, or None."""
    memory = run.section("memory")
    compared = run.section("measured").get("device_peak_bytes")
    totals = memory.get("total_bytes")
    known = None
    if isinstance(totals, Mapping):
        known = totals.get(memory.get("peak"))
    if known is None and isinstance(compared, Mapping):
        known = compared.get("estimate")
    if isinstance(known, int | float) and isfinite(known) and known > 0:
        return float(known)
    return None


def _positive(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return name and value of the numbers above 0, with spaces in the names."""
    positive = []
    for name, value in values.items():
        if isinstance(value, int | float) and isfinite(value) and value > 0:
            positive.append((str(name).replace("_", " "), float(value)))
    return positive


def _goodput(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    bars = []
    longest = 0.0
    for run in runs:
        attributed = goodput(run)
        if attributed is not None:
            bars.append((run.name, list(attributed.parts.items())))
            longest = max(longest, sum(attributed.parts.values()))
    unit = "s"
    divisor = 1.0
    if longest > 7200:
        unit = "h"
        divisor = 3600.0
    elif longest > 120:
        unit = "min"
        divisor = 60.0
    title = "What the time of the run was spent on"
    yield bar_chart("goodput", title, unit, bars, show=duration, shown_unit=divisor)


def _others(runs: Sequence[RunRecords]) -> Iterator[Chart | None]:
    """Draw the metrics without a chart elsewhere, if one of their values is not 0."""
    names = []
    for name in _names(runs, ""):
        has_own_chart = name == "train/loss" or name in _CURVES or name in _RATES
        if not has_own_chart and not name.startswith(_SHOWN_ELSEWHERE):
            names.append(name)
    for index, name in enumerate(names[:_MOST_OTHERS]):
        lines = _lines(runs, name)
        if any(any(line.series.finite_values) for line in lines):
            yield line_chart(f"other-{index}", name, name.rpartition("/")[2], lines)


def _names(runs: Sequence[RunRecords], prefix: str) -> list[str]:
    return sorted({name for run in runs for name in run.metrics if name.startswith(prefix)})
