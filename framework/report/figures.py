"""Figures of a run, derived from its records: means without warm-up, the split of a step, goodput,
headline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

from framework.report.goodput import Goodput, goodput
from framework.report.records import RunRecords
from framework.report.series import Series
from framework.report.verdict import SLOW_RANK, Verdict, judge
from framework.system.metric_names import PHASES, time_of

PHASE_NAMES: Final[Mapping[str, str]] = {
    "data": "waiting for data",
    "copy": "copy to device",
    "not timed": "not timed in parts",
}
Outcome = Literal["finished", "stopped", "failed", "open"]
# Last words of the names of metrics that fall while a model improves; of all others more is better.
_LESS_IS_BETTER: Final = ("loss", "perplexity", "error", "mae", "mse", "rmse", "wer", "cer")


def weights(series: Series) -> list[float]:
    """Return for each point of a series how many steps it stands for: all since the last point."""
    counts = []
    before = 0
    for step in series.steps:
        counts.append(float(step) - float(before))
        before = step
    return counts


def means(run: RunRecords) -> Mapping[str, float]:
    """Return the mean per step of every time and throughput metric, and the peak of every memory
    metric; kept in `run.means`.

    The first interval pays for warm-up and is left out if there are others. Parts of a step keep
    adding up to the step's time, which medians would not.
    """
    if run.means:  # to compute the means of a long run takes a second, and a page needs them often
        return run.means
    for name, series in run.metrics.items():
        mean = None
        if name.startswith(("time/", "throughput/", "ranks/")):
            mean = _mean(series, is_rate=name.endswith("_per_sec"))
        elif name.startswith("memory/") and series.finite:
            mean = max(series.finite_values)
        if mean is not None:
            run.means[name] = mean
    return run.means


def _mean(series: Series, *, is_rate: bool) -> float | None:
    """Return the mean of a metric over steps, without its first point if it has others; None
    without a finite value. A rate with values above 0 gets its harmonic mean.
    """
    pairs = list(zip(weights(series), series.values, strict=True))
    total = 0.0
    weighted = 0.0
    time_of_rate = 0.0
    is_positive = True
    for weight, value in pairs[1:] or pairs:
        if math.isfinite(value):
            total += weight
            weighted += weight * value
            if value > 0:
                time_of_rate += weight / value
            else:
                is_positive = False
    if not total:
        return None
    # A rate is averaged over time: slow intervals take more of it.
    if is_rate and is_positive:
        return total / time_of_rate
    return weighted / total


def time_split(means: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a mean step in milliseconds, in the order of a step; time without a
    metric is ``not timed``.
    """
    parts = {}
    for phase in PHASES:
        if time_of(phase) in means:
            parts[phase] = means[time_of(phase)]
    step = means.get("time/step_ms", 0.0)
    rest = step - sum(parts.values())
    # A smaller rest is what rounding leaves of parts that were timed.
    if rest > 0.02 * step:
        parts["not timed"] = rest
    return parts


def verdict_of(run: RunRecords) -> Verdict:
    """Judge a run by its records."""
    layout = run.section("layout")
    return judge(
        means(run),
        pipe_size=_count(layout.get("pipe_size")),
        accumulation_steps=_count(layout.get("accumulation_steps")),
        saving_share=_saving_share(run),
        device_bytes=device_bytes(run),
        ended_with=error_of(run),
    )


def _saving_share(run: RunRecords) -> float:
    """Return the share of saves in the time of steps and saves; 0 if no event records a save."""
    attributed = goodput(run)
    if attributed is None:
        return 0.0
    parts = attributed.parts
    saving = parts.get("saving", 0.0)
    if not saving:
        return 0.0
    return saving / (saving + parts.get("training", 0.0) + parts.get("waiting for data", 0.0))


def device_bytes(run: RunRecords) -> float | None:
    """Return the memory of one device; None if the run did not record it."""
    known = run.environment.get("device_memory_bytes")
    if isinstance(known, int | float) and known > 0:
        return float(known)
    return None


def total_steps(run: RunRecords) -> int:
    """Return the number of steps that were planned; 0 if that is not known."""
    return _count(run.section("length").get("total_steps"), least=0)


def error_of(run: RunRecords) -> str:
    """Return the error that ended the last start of the run; empty if none did, as far as its
    events and the log of rank 0 show.
    """
    events = run.happened("start", "resume", "end")
    if events and events[-1]["kind"] == "end":
        return str(events[-1].get("error", ""))
    # An error in the log may be of an earlier start, from which this one goes on.
    for event in events:
        error = str(event.get("error", ""))
        if error and error in run.last_error:
            return ""
    return run.last_error


def outcome(run: RunRecords) -> Outcome:
    """Return how the last start of the run ended; ``open`` if it trains, or was ended from outside.

    An error wins over the number of steps: the last evaluation and the last save come after the
    last step.
    """
    if error_of(run):
        return "failed"
    events = run.happened("start", "resume", "stop", "end")
    if events and events[-1]["kind"] == "end":
        return "finished" if events[-1].get("is_finished", True) else "stopped"
    if 0 < total_steps(run) <= run.last_step:
        return "finished"
    if events and events[-1]["kind"] == "stop":
        return "stopped"
    return "open"


def state(run: RunRecords) -> str:
    """Return how far the run has come, and how it ended, in a few words."""
    ended = outcome(run)
    steps = run.last_step
    planned = total_steps(run)
    if ended == "finished":
        return f"finished after {steps:,} steps"
    reached = f"{steps:,} steps"
    if planned:
        reached = f"{steps:,} of {planned:,} steps"
    if ended == "failed":
        return f"failed after {reached}"
    if ended == "stopped":
        return f"stopped on request after {reached}"
    return f"reached {reached}; it trains, or was ended from outside"


def changes(run: RunRecords) -> list[dict[str, Any]]:
    """Return the settings that starts of the run had otherwise than their checkpoints
    (`checkpoint.allow_changed`), with the steps that they began at.
    """
    found = []
    for event in run.happened("changed"):
        lines = event.get("changes")
        if isinstance(lines, list):
            found.append({"step": event.get("step"), "changes": [str(line) for line in lines]})
    return found


def seconds(run: RunRecords) -> float:
    """Return the time from the first event, or the begin of the first logged interval, to the last
    record; 0 if no step was taken.
    """
    attributed = goodput(run)
    return attributed.total if attributed else 0.0


def goodput_line(attributed: Goodput) -> str:
    """Return a line with goodput and the rest of the time by what it was spent on, the most first;
    less than a hundredth is left out.
    """
    total = attributed.total
    shown = []
    for name, value in sorted(attributed.parts.items(), key=lambda part: -part[1]):
        if value >= 0.01 * total:
            text = f"{name} {duration(value)}"
            if name == "between restarts":
                text += f" ({attributed.restarts})"
            shown.append(text)
    return f"{attributed.share:.1%} of {duration(total)}: {', '.join(shown)}"


def headline(run: RunRecords) -> dict[str, list[tuple[str, str]]]:
    """Return the figures for the top of the page, label and text, by what a reader asks for: the
    result first, then the time that it took, then speed and memory.
    """
    groups = {
        "Result": _results(run),
        "Time": _time_taken(run),
        "Speed and memory": _speed(run) + _memory(run),
    }
    return {name: rows for name, rows in groups.items() if rows}


def main_metric(run: RunRecords) -> str:
    """Return the name of the metric that stands for the result: the one that
    `checkpoint.keep_best` names, else the first of the evaluations that is not a loss, else the
    first of their losses; empty if nothing was evaluated.
    """
    names = list(eval_metrics(run))
    kept = run.setting("checkpoint", "keep_best")
    if kept in names:
        return str(kept)
    for name in names:
        if not name.endswith("/loss"):
            return name
    return names[0] if names else ""


def result_text(run: RunRecords) -> str:
    """Return the best value of the main metric with its step, and the last value where it is
    another; without evaluations the last training loss. Empty if nothing was measured.
    """
    metric = main_metric(run)
    if metric:
        series = run.metrics[metric]
        step, value = best(metric, series)
        last_step, last = series.finite[-1]
        if last == value:
            return f"{metric} {number(value)}, best at step {step:,}"
        return f"{metric} {number(value)}, best at step {step:,} ({number(last)} at {last_step:,})"
    loss = run.metrics.get("train/loss", Series()).finite
    if loss:
        return f"train/loss {number(loss[-1][1])} at step {loss[-1][0]:,}, not evaluated"
    return ""


def _results(run: RunRecords) -> list[tuple[str, str]]:
    """Return the best evaluations, the main metric first, and the last training loss."""
    rows = []
    metrics = eval_metrics(run)
    main = main_metric(run)
    for name in sorted(metrics, key=lambda name: name != main):
        step, value = best(name, metrics[name])
        rows.append((f"best {name}", f"{number(value)} at step {step:,}"))
    loss = run.metrics.get("train/loss", Series()).finite
    if loss:
        rows.append(("last train/loss", number(loss[-1][1])))
    return rows


def _time_taken(run: RunRecords) -> list[tuple[str, str]]:
    """Return how far the run has come, the time that it took, and the share that trained."""
    rows = []
    spent = seconds(run)
    if spent:
        rows.append(("duration", duration(spent)))
    rows.append(("steps", _steps_text(run)))
    if run.epochs.finite:
        rows.append(("epochs", f"{run.epochs.finite[-1][1]:.4g}"))
    attributed = goodput(run)
    if attributed is not None:
        rows.append(("goodput", f"{attributed.share:.1%}"))
    return rows


def _steps_text(run: RunRecords) -> str:
    planned = total_steps(run)
    if planned > run.last_step:
        return f"{run.last_step:,} of {planned:,}"
    return f"{run.last_step:,}"


def eval_metrics(run: RunRecords) -> dict[str, Series]:
    """Return the metrics of evaluations that have a finite value, by name."""
    metrics = {}
    for name, series in sorted(run.metrics.items()):
        if name.startswith("eval/") and series.finite:
            metrics[name] = series
    return metrics


def _speed(run: RunRecords) -> list[tuple[str, str]]:
    """Return rates, the time of a step, and the slowest rank."""
    mean = means(run)
    rows = []
    for name, label, unit in (
        ("throughput/tokens_per_sec", "tokens per second", "tokens/s"),
        ("throughput/samples_per_sec", "samples per second", "samples/s"),
    ):
        if name in mean:
            rows.append((label, f"{number(mean[name])} {unit}"))
    if "throughput/tflops" in mean:
        unit, factor = flops_unit(mean["throughput/tflops"])
        value = number(factor * mean["throughput/tflops"])
        rows.append(("arithmetic", f"{value} {unit} per device"))
    if "throughput/mfu" in mean:
        rows.append(("MFU", f"{mean['throughput/mfu']:.1%}"))
    if "time/step_ms" in mean:
        rows.append(("mean step", f"{number(mean['time/step_ms'])} ms"))
    factor = mean.get("ranks/slowest_factor", 0.0)
    if factor >= SLOW_RANK:
        _, rank = run.metrics["ranks/slowest"].finite[-1]
        rows.append(("slowest rank", f"{rank:.0f} works {factor:.2f} times as long"))
    return rows


def _memory(run: RunRecords) -> list[tuple[str, str]]:
    mean = means(run)
    rows = []
    for name, label in (
        ("memory/device_peak_bytes", "peak device memory"),
        ("memory/host_peak_bytes", "peak host memory"),
    ):
        if name in mean:
            rows.append((label, size(mean[name])))
    return rows


def best(name: str, series: Series) -> tuple[int, float]:
    """Return step and value of the best finite point of a metric: the least of losses and errors by
    its name, the largest of others. ValueError without a finite point.
    """
    word = name.rpartition("/")[2].lower()
    if word.endswith(_LESS_IS_BETTER):
        return min(series.finite, key=lambda point: point[1])
    return max(series.finite, key=lambda point: point[1])


def summary(run: RunRecords) -> dict[str, Any]:
    """Return state, verdict and figures of a run as plain values, for ``--json``."""
    verdict = verdict_of(run)
    mean = means(run)
    last_values = {}
    best_points = {}
    for name, series in run.metrics.items():
        if series.finite:
            last_values[name] = series.finite[-1][1]
            if name.startswith("eval/"):
                step, value = best(name, series)
                best_points[name] = {"step": step, "value": value}
    goodput_values = None
    attributed = goodput(run)
    if attributed is not None:
        goodput_values = {"share": attributed.share, "seconds": dict(attributed.parts)}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": state(run),
        "outcome": outcome(run),
        "error": error_of(run) or None,
        "step": run.last_step,
        "total_steps": total_steps(run) or None,
        "verdict": {
            "kind": verdict.kind,
            "sentence": verdict.sentence,
            "advice": verdict.advice,
            "share": verdict.share,
        },
        "last": last_values,
        "best": best_points,
        "mean": mean,
        "time_split_ms": time_split(mean),
        "goodput": goodput_values,
        "changes": changes(run),
        "warnings": run.warnings,
        "notes": run.notes,
    }


def number(value: float) -> str:
    """Write a number with four significant digits."""
    if not math.isfinite(value):
        return "NaN"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(num_bytes: float) -> str:
    """Write bytes in a unit that fits."""
    unit, unit_bytes = byte_unit(abs(num_bytes))
    return f"{num_bytes / unit_bytes:.4g} {unit}"


def byte_unit(largest: float) -> tuple[str, float]:
    """Return the unit in which the largest of some sizes is at least 1, and its bytes."""
    num_bytes = 1.0
    for unit in ("B", "KiB", "MiB", "GiB"):
        if largest < 1024 * num_bytes:
            return unit, num_bytes
        num_bytes *= 1024
    return "TiB", num_bytes


def flops_unit(largest: float) -> tuple[str, float]:
    """Return the unit in which the largest of some rates in TFLOP/s is at least 1, and the factor
    from TFLOP/s.
    """
    factor = 1.0
    for unit in ("TFLOP/s", "GFLOP/s"):
        if largest * factor >= 1:
            return unit, factor
        factor *= 1000.0
    return "MFLOP/s", factor


def duration(spent: float) -> str:
    """Write seconds in the units that a person reads."""
    if spent < 60:
        return f"{spent:.3g} s"
    minutes, rest = divmod(round(spent), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {rest:02} s"


def moment(stamp: float) -> str:
    """Write a Unix time in UTC; empty if it is no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(stamp))
    except (OverflowError, ValueError, OSError):
        return ""


def _count(value: Any, *, least: int = 1) -> int:
    if isinstance(value, int):
        return max(least, value)
    return least
