"""Chooses the constants of `framework/plan/fitted_rates.py` by published points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log, prod
from typing import Final

from benchmarks.planner.cases import Case, cases
from framework.plan.fitted_rates import Rates

# Fitted; other fields of `Rates` have a source of their own.
FITTED: Final = (
    "plateau",
    "plateau_hopper",
    "attention",
    "attention_hopper",
    "width",
    "memory",
    "network",
    "best_plain",
    "best_tf32",
    "launch_seconds",
    "weight_seconds",
)
# Where the search begins: what was fitted before on llm-foundry's points alone, and guesses.
START: Final = Rates(
    plateau=0.91,
    plateau_hopper=0.822,
    attention=0.323,
    attention_hopper=0.2,
    width=2270.0,
    memory=0.612,
    network=0.8,
    best_plain=0.9,
    best_tf32=0.8,
    launch_seconds=2e-5,
    weight_seconds=6.6e-4,
)
# DeepSpeed of early 2021: its gathers of stage 3 are not those that are estimated.
SHOWN_ONLY: Final = ("narayanan-zero3",)
_MOST: Final = 24  # points of one source in a fit: the largest has 209
_OUTLIER: Final = 0.3  # log ratios beyond it count less: in proportion, not by their square
_PULL: Final = 0.02  # towards the start, for constants that few points show


def sample(points: Sequence[Case]) -> list[tuple[Case, float]]:
    """Return the points of a fit, evenly taken from each source, with weights: each source counts
    as much as every other.
    """
    by_name: dict[str, list[Case]] = {}
    for case in points:
        if case.point["source"]["name"] in SHOWN_ONLY:
            continue
        by_name.setdefault(case.point["source"]["name"], []).append(case)
    taken = []
    for group in by_name.values():
        step = max(len(group) / _MOST, 1.0)
        chosen = [group[int(number * step)] for number in range(min(len(group), _MOST))]
        taken += [(case, 1 / len(chosen)) for case in chosen]
    return taken


def fit(points: Sequence[Case], start: Rates = START) -> Rates:
    """Choose the constants by least squares of log ratios, from steps of Gauss and Newton in the
    logarithms of the constants; ratios far off count in proportion (Huber 1964).
    """
    chosen = sample(points)
    logs = [log(getattr(start, name)) for name in FITTED]
    origin = list(logs)
    for _ in range(6):
        rates = _rates_of(logs, start)
        errors = [log(case.ratio(rates)) for case, _ in chosen]
        slopes = []
        for number in range(len(FITTED)):
            moved = list(logs)
            moved[number] -= 0.05
            other = _rates_of(moved, start)
            slopes.append(
                [
                    (error - log(case.ratio(other))) / 0.05
                    for (case, _), error in zip(chosen, errors, strict=True)
                ]
            )
        weights = [
            weight * min(1.0, _OUTLIER / max(abs(error), 1e-9))
            for (_, weight), error in zip(chosen, errors, strict=True)
        ]
        step = _newton_step(
            slopes, errors, weights, [a - b for a, b in zip(logs, origin, strict=True)]
        )
        for number, change in enumerate(step):
            most = log(_most(FITTED[number]))
            logs[number] = min(logs[number] + max(min(change, 0.5), -0.5), most)
    return _rates_of(logs, start)


def _rates_of(logs: Sequence[float], start: Rates) -> Rates:
    """Return the constants of these logarithms."""
    return replace(start, **dict(zip(FITTED, map(exp, logs), strict=True)))


def _most(name: str) -> float:
    """Return the most that a constant may be: a share is at most 1."""
    return 1e5 if name == "width" else 1.0


def _newton_step(
    slopes: Sequence[Sequence[float]],
    errors: Sequence[float],
    weights: Sequence[float],
    distance: Sequence[float],
) -> list[float]:
    """Solve the normal equations of weighted least squares with a pull to the start.

    Args:
        slopes: of each constant, the change of every error by it.
        errors: to be made zero.
        weights: of each error.
        distance: of each constant from its start.
    """
    size = len(slopes)
    rows = []
    for one in range(size):
        row = [
            sum(map(prod, zip(slopes[one], slopes[other], weights, strict=True)))
            for other in range(size)
        ]
        row[one] += _PULL
        right = -sum(map(prod, zip(slopes[one], errors, weights, strict=True)))
        rows.append([*row, right - _PULL * distance[one]])
    for pivot in range(size):  # Gauss: the pull keeps every pivot above zero
        for other in range(size):
            if other == pivot:
                continue
            factor = rows[other][pivot] / rows[pivot][pivot]
            rows[other] = [a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)]
    return [row[-1] / row[number] for number, row in enumerate(rows)]


def left_out_rates() -> dict[str, Rates]:
    """Return the constants that all other sources give, by the source that is left out."""
    names = dict.fromkeys(case.point["source"]["name"] for case in cases())
    return {
        name: fit([case for case in cases() if case.point["source"]["name"] != name])
        for name in names
    }
