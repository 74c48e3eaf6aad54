"""Figures of a run, derived from its records: means without warm-up, the split of a step, goodput,
headline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from framework.report.goodput import Goodput, goodput
from framework.report.records import RunRecords
from framework.report.series import Series
from framework.report.verdict import PHASES, SLOW_RANK, Verdict, judge

PHASE_NAMES: Final[Mapping[str, str]] = {
    "data": "waiting for data",
    "copy": "copy to device",
    "not timed": "not timed in parts",
}
# Of a metric that falls while a model improves, by its last word; of all others more is better.
_LESS_IS_BETTER: Final = ("loss", "perplexity", "error", "mae", "mse", "rmse", "wer", "cer")


def weights(series: Series) -> list[float]:
    """Steps that each point of a series stands for: those since the point before."""
    return list(map(float.__sub__, map(float, series.steps), map(float, [0, *series.steps[:-1]])))


def means(run: RunRecords) -> Mapping[str, float]:
    """Mean of every time, throughput and memory metric per step, without the first interval where
    there are others: it pays for warm-up. Parts of a step keep adding up to the whole, which
    medians would not.
    """
    if run.means:  # of a long run they take a second, and a page asks for them often
        return run.means
    found = run.means
    for name, series in run.metrics.items():
        if name.startswith(("time/", "throughput/", "ranks/")):
            pairs = list(zip(weights(series), series.values, strict=True))
            pairs = [
                (weight, value) for weight, value in pairs[1:] or pairs if math.isfinite(value)
            ]
            total = sum(weight for weight, _ in pairs)
            if total:
                # A rate is averaged over time, of which slow intervals take more.
                if name.endswith("_per_sec") and all(value > 0 for _, value in pairs):
                    found[name] = total / sum(weight / value for weight, value in pairs)
                else:
                    found[name] = sum(weight * value for weight, value in pairs) / total
        elif name.startswith("memory/") and (values := series.finite):
            found[name] = max(value for _, value in values)
    return found


def time_split(found: Mapping[str, float]) -> dict[str, float]:
    """Parts of a mean step in milliseconds, in the order of a step; what no metric covers is ``not
    timed``.
    """
    parts = {phase: found[f"time/{phase}_ms"] for phase in PHASES if f"time/{phase}_ms" in found}
    rest = found.get("time/step_ms", 0.0) - sum(parts.values())
    # Less is what rounding leaves of parts that were timed.
    return parts | ({"not timed": rest} if rest > 0.02 * found.get("time/step_ms", 0.0) else {})


def verdict_of(run: RunRecords) -> Verdict:
    """Judge a run by its records."""
    layout = run.section("layout")
    return judge(
        means(run),
        pipe_size=_count(layout.get("pipe_size")),
        accumulation_steps=_count(layout.get("accumulation_steps")),
        saving_share=_saving_share(run),
        device_bytes=device_bytes(run),
        ended_with="" if is_finished(run) else run.last_error,
    )


def _saving_share(run: RunRecords) -> float:
    """Part of the time for steps and saves that saves take; 0 where no event tells of them."""
    found = goodput(run)
    parts = found.parts if found else {}
    saving = parts.get("saving", 0.0)
    if saving:
        return saving / (saving + parts.get("training", 0.0) + parts.get("waiting for data", 0.0))
    return 0.0


def device_bytes(run: RunRecords) -> float | None:
    """Memory of one device; None where the run did not record it."""
    values = run.metrics.get("memory/device_total_bytes", Series()).finite
    known = values[-1][1] if values else run.environment.get("device_memory_bytes")
    if isinstance(known, int | float) and known > 0:
        return float(known)
    return None


def total_steps(run: RunRecords) -> int:
    """Steps that were planned; 0 where that is not known."""
    return _count(run.section("length").get("total_steps"), least=0)


def is_finished(run: RunRecords) -> bool:
    """Check whether the run has reached its last step, or was ended early by a callback."""
    last = run.happened("start", "resume", "end")[-1:]
    has_ended = any(
        event["kind"] == "end" and event.get("is_finished", "error" not in event) for event in last
    )
    return has_ended or 0 < total_steps(run) <= run.last_step


def state(run: RunRecords) -> str:
    """How far the run has come, and how it ended, in a few words."""
    steps = run.last_step
    planned = total_steps(run)
    if planned:
        reached = f"{steps:,} of {planned:,} steps"
    else:
        reached = f"{steps:,} steps"
    if is_finished(run):
        return f"finished after {steps:,} steps"
    if [event["kind"] for event in run.happened("start", "resume", "stop")[-1:]] == ["stop"]:
        return f"stopped on request after {reached}"
    if run.last_error:
        return f"ended by an error after {reached}"
    return f"reached {reached}; it trains, or was ended from outside"


def seconds(run: RunRecords) -> float:
    """Time from the first event or the begin of the first logged interval to the last record,
    without breaks.
    """
    found = goodput(run)
    return found.total if found else 0.0


def goodput_line(found: Goodput) -> str:
    """Goodput and what the rest of the time went to, the most first, in a line; less than a
    hundredth is left out.
    """
    parts = sorted(found.parts.items(), key=lambda part: -part[1])
    shown = [
        f"{name} {duration(value)}" + (f" ({found.restarts})" if name == "between restarts" else "")
        for name, value in parts
        if value >= 0.01 * found.total
    ]
    return f"{found.share:.1%} of {duration(found.total)}: {', '.join(shown)}"


def headline(run: RunRecords) -> list[tuple[str, str]]:
    """Figures for the top of the page: label and text."""
    mean = means(run)
    last = {name: points[-1] for name, each in run.metrics.items() if (points := each.finite)}
    planned = total_steps(run)
    rows = [
        ("steps", f"{run.last_step:,}" + (f" of {planned:,}" if planned > run.last_step else ""))
    ]
    epochs = run.epochs.finite
    if epochs:
        rows.append(("epochs", f"{epochs[-1][1]:.4g}"))
    spent = seconds(run)
    if spent:
        rows.append(("duration", duration(spent)))
    if "train/loss" in last:
        rows.append(("last train/loss", number(last["train/loss"][1])))
    for name in sorted(run.metrics):
        if name.startswith("eval/") and name in last:
            step, value = best(name, run.metrics[name])
            rows.append((f"best {name}", f"{number(value)} at step {step:,}"))
    rates = {
        "tokens_per_sec": "tokens/s",
        "samples_per_sec": "samples/s",
        "tflops": "TFLOP/s per device",
    }
    for name, unit in rates.items():
        if f"throughput/{name}" in mean:
            rows.append(
                (
                    name.replace("_per_sec", " per second"),
                    f"{number(mean[f'throughput/{name}'])} {unit}",
                )
            )
    if "throughput/mfu" in mean:
        rows.append(("MFU", f"{mean['throughput/mfu']:.1%}"))
    if "time/step_ms" in mean:
        rows.append(("mean step", f"{number(mean['time/step_ms'])} ms"))
    factor = mean.get("ranks/slowest_factor", 0.0)
    if factor >= SLOW_RANK:
        rows.append(
            ("slowest rank", f"{last['ranks/slowest'][1]:.0f} works {factor:.2f} times as long")
        )
    for name, label in (
        ("memory/device_peak_bytes", "device memory"),
        ("memory/host_peak_bytes", "host memory"),
    ):
        if name in mean:
            rows.append((f"peak {label}", size(mean[name])))
    found = goodput(run)
    if found is not None:
        rows.append(("goodput", f"{found.share:.1%}"))
    return rows


def best(name: str, series: Series) -> tuple[int, float]:
    """The best point of a metric that has one."""
    less = name.rpartition("/")[2].lower().endswith(_LESS_IS_BETTER)
    return (min if less else max)(series.finite, key=lambda point: point[1])


def summary(run: RunRecords) -> dict[str, Any]:
    """Everything as plain values, for ``--json``."""
    verdict = verdict_of(run)
    found = goodput(run)
    mean = means(run)
    finite = {name: points for name, each in run.metrics.items() if (points := each.finite)}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": state(run),
        "step": run.last_step,
        "total_steps": total_steps(run) or None,
        "verdict": {
            "kind": verdict.kind,
            "sentence": verdict.sentence,
            "advice": verdict.advice,
            "share": verdict.share,
        },
        "last": {name: points[-1][1] for name, points in finite.items()},
        "best": {
            name: dict(zip(("step", "value"), best(name, run.metrics[name]), strict=True))
            for name in finite
            if name.startswith("eval/")
        },
        "mean": mean,
        "time_split_ms": time_split(mean),
        "goodput": None if found is None else {"share": found.share, "seconds": dict(found.parts)},
        "warnings": run.warnings,
        "notes": run.notes,
    }


def number(value: float) -> str:
    """A number with four digits that count."""
    if not math.isfinite(value):
        return "NaN"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(num_bytes: float) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def duration(spent: float) -> str:
    """Seconds as a person says them."""
    if spent < 60:
        return f"{spent:.3g} s"
    minutes, rest = divmod(round(spent), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {rest:02} s"


def moment(stamp: float) -> str:
    """A Unix time in UTC; empty where it is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(stamp))
    except (OverflowError, ValueError, OSError):
        return ""


def _count(value: Any, *, least: int = 1) -> int:
    if isinstance(value, int):
        return max(least, value)
    return least
