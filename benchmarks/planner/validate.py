"""Compares the planner's estimates with published measurements: ``python -m
benchmarks.planner.validate [--fit | --kept]``.

``--fit`` chooses the constants of `framework/plan/fitted_rates.py` on all sources and prints them.
Without it the constants are chosen once more for each source, on all others, and the errors are
written to `benchmarks/results/planner.json` and to the table in `docs/planner.md`: what a source
whose points are left out of the fit may expect; the form was chosen with all in view. ``--kept``
takes the constants that were written. Which points take part is decided by their fields
(`left_out`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, Final

from benchmarks.planner.cases import Case, cases, left_out
from benchmarks.planner.fit import FITTED, SHOWN_ONLY, START, fit, left_out_rates
from benchmarks.planner.memory_cases import memory_left_out, memory_of, unused_share
from benchmarks.planner.published import read_points
from benchmarks.records import RESULTS, ROOT
from framework.plan.fitted_rates import RATES, Rates
from framework.plan.memory import NotEstimatedError

_COMPARED: Final = "all but narayanan-zero3"


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two rows of figures."""
    return statistics.correlation(ranks(one), ranks(other))


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the errors of pairs of an estimate and a measurement."""
    estimates = [estimated for estimated, _ in pairs]
    measurements = [measured for _, measured in pairs]
    ratios = [estimated / measured for estimated, measured in pairs]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    correlation = None
    if len(pairs) >= 5 and len(set(measurements)) > 1:
        correlation = round(spearman(estimates, measurements), 3)
    return {
        "points": len(pairs),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": round(errors[min(int(0.9 * len(errors)), len(errors) - 1)], 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "spearman": correlation,
    }


def by_source(rows: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Return the errors of all rows together and by source. A row is the name of a source, an
    estimate and a measurement.
    """
    pairs_by_source: dict[str, list[tuple[float, float]]] = {}
    for source, estimated, measured in rows:
        pairs_by_source.setdefault(source, []).append((estimated, measured))
    if not pairs_by_source:
        return {}
    errors = {"all": summary(list(chain.from_iterable(pairs_by_source.values())))}
    for source, pairs in pairs_by_source.items():
        errors[source] = summary(pairs)
    return errors


def throughput_errors(rates_without: Mapping[str, Rates]) -> dict[str, Any]:
    """Return the errors by source: with the constants that all other sources give, and with the
    constants of the estimate, which all sources gave.

    Args:
        rates_without: constants by the source that they were fitted without.
    """
    left_out = []
    fitted = []
    kinds: dict[str, list[Case]] = {}
    for case in cases():
        name = case.point["source"]["name"]
        kinds.setdefault(name, []).append(case)
        left_out.append((name, case.ratio(rates_without[name]) * case.measured, case.measured))
        fitted.append((name, case.ratio() * case.measured, case.measured))
    errors = {"left out": by_source(left_out), "fitted": by_source(fitted)}
    errors["kinds"] = {name: kinds_of(group) for name, group in kinds.items()}
    for kind, rows in (("left out", left_out), ("fitted", fitted)):
        errors[kind][_COMPARED] = by_source(row for row in rows if row[0] not in SHOWN_ONLY)["all"]
    medians = [
        row["median_error"]
        for name, row in errors["left out"].items()
        if name not in ("all", _COMPARED, *SHOWN_ONLY)
    ]
    errors["median_of_sources"] = round(statistics.median(medians), 4)
    return errors


def kinds_of(group: Sequence[Case]) -> str:
    """Return what the points of a source are, in words: devices and how they share the work."""
    words = dict.fromkeys(case.point["device"] for case in group)
    for case in group:
        by = case.parallelism
        strategy = case.point["strategy"] or "ddp"
        words[strategy.replace("zero", "ZeRO ").replace("ddp", "data parallel")] = None
        for size, word in ((by.tensor, "tensor"), (by.pipe, "pipe")):
            if size > 1:
                words[word] = None
        if case.point["model"].get("lora_r"):
            words["LoRA"] = None
        if case.point["model"]["kind"] in ("bert", "resnet50"):
            words[{"bert": "BERT", "resnet50": "ResNet-50"}[case.point["model"]["kind"]]] = None
    return ", ".join(words)


def memory_errors(split: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the errors of one half, and the number of points left out for each reason."""
    rows = []
    reasons = list[str | None]()
    for point in read_points(split):
        reason = memory_left_out(point)
        if reason is None:
            try:
                rows.append((point["source"]["name"], memory_of(point), point["memory_gib"]))
            except NotEstimatedError as error:
                reason = str(error)
        reasons.append(reason)
    return by_source(rows), _counted(reasons)


def _counted(reasons: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(reason for reason in reasons if reason).most_common())


def results(rates: Mapping[str, Rates]) -> dict[str, Any]:
    """Return the results to write: errors and points left out, and the constants.

    Args:
        rates: constants by the source that they were fitted without.
    """
    without = {}
    for name, found in rates.items():
        without[name] = {field: getattr(found, field) for field in FITTED}
    written: dict[str, Any] = {
        "constants": asdict(RATES),
        "constants_without": without,
        "throughput": throughput_errors(rates),
        "throughput_left_out": _counted(map(left_out, read_points())),
    }
    errors = {}
    reasons = {}
    for half in ("fit", "holdout"):
        errors[half], reasons[half] = memory_errors(half)
    written["memory"] = errors
    written["memory_left_out"] = reasons
    return written


def rates_of(without: Mapping[str, Mapping[str, float]]) -> dict[str, Rates]:
    """Return the constants that `results` wrote, by the source that they were fitted without."""
    return {name: replace(START, **values) for name, values in without.items()}


def table(written: Mapping[str, Any]) -> str:
    """Return the results as the page shows them."""
    throughput = written["throughput"]
    lines = [
        "Throughput:",
        "",
        "| source | kinds | points | left out: median error | nine of ten within "
        "| estimated / measured | Spearman | with all sources: median error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, errors in throughput["left out"].items():
        title = f"**{name}**" if name in ("all", _COMPARED) else name
        kinds = throughput["kinds"].get(name, "")
        fitted = throughput["fitted"][name]["median_error"]
        lines.append(
            f"| {title} | {kinds} | {errors['points']} | {errors['median_error']:.1%} "
            f"| {errors['p90_error']:.1%} | {errors['median_ratio']:.2f} "
            f"| {_rank(errors, name)} | {fitted:.1%} |"
        )
    lines += [
        "",
        f"The median of the sources' medians, without {', '.join(SHOWN_ONLY)}, is "
        f"{throughput['median_of_sources']:.1%}.",
        "",
        "Memory, for which nothing was fitted but the share of unused pieces:",
        "",
        "| source | half | points | median error | nine of ten within | estimated / measured "
        "| Spearman |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for half, errors_by_source in written["memory"].items():
        for name, errors in errors_by_source.items():
            title = f"**all of {half}**" if name == "all" else name
            lines.append(
                f"| {title} | {half} | {errors['points']} | {errors['median_error']:.1%} "
                f"| {errors['p90_error']:.1%} | {errors['median_ratio']:.2f} "
                f"| {_rank(errors, name)} |"
            )
    lines += [
        "",
        "Left out, by a rule on their fields (`left_out` in `cases.py`, `memory_left_out` in "
        "`memory_cases.py`):",
        "",
    ]
    lines.append(f"- throughput: {_listed(written['throughput_left_out'])}.")
    for half, reasons in written["memory_left_out"].items():
        lines.append(f"- memory, {half}: {_listed(reasons)}.")
    return "\n".join(lines) + "\n"


def _rank(errors: Mapping[str, Any], name: str) -> str:
    if errors["spearman"] is None or name in ("all", _COMPARED):
        return ""
    return f"{errors['spearman']:.2f}"


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def main() -> None:
    """Fit on all sources, or write the results and the page's table."""
    if "--fit" in sys.argv[1:]:
        print(fit(cases()))
        print(f"unused share: {unused_share():.4f}")
        return
    if "--kept" in sys.argv[1:]:
        kept = json.loads((RESULTS / "planner.json").read_text(encoding="utf-8"))
        written = results(rates_of(kept["constants_without"]))
    else:
        written = results(left_out_rates())
    (RESULTS / "planner.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    page = ROOT / "docs/planner.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}{table(written)}{_END}{after}", encoding="utf-8")
    print(table(written))


_BEGIN: Final = "<!-- python -m benchmarks.planner.validate -->\n"
_END: Final = "<!-- end -->\n"

if __name__ == "__main__":
    main()
