"""Metrics that a run follows, held against those that its evaluations give."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from framework.config.run_config import RunConfig, watched_metrics
from framework.data.splits import Splits
from framework.errors import ConfigError, Problem


def refuse_unmeasured(
    config: RunConfig, splits: Splits, *, added: Collection[str] = (), is_open: bool = False
) -> None:
    """Refuse metrics that no evaluation set gives: they would never have a value.

    Args:
        config: of the run.
        splits: its data.
        added: names of metrics of torchmetrics. One may give several figures, which begin with its
            name.
        is_open: the task computes metrics of all samples, with names that are known after it.
    """
    areas = _areas(splits)
    if not areas:
        return
    known: list[str] = []  # empty if the task's metrics have no names
    names = getattr(config.task, "metrics", ())
    if names and not is_open and "" not in added:
        known = _joined(areas, (*names, *added))
    # What the figures of one metric of torchmetrics begin with.
    several = _joined(areas, [f"{name}_" for name in added])
    problems = []
    for key, metric in _watched_in_evaluations(config):
        if not metric.startswith(tuple(several)) and not _is_given(metric, known, areas):
            reason = "no evaluation set gives it"
            fix = f"write one of {', '.join(known or areas)}"
            problems.append(Problem("unknown-metric", reason, fix, key, metric))
    if problems:
        raise ConfigError(problems)


def _areas(splits: Splits) -> list[str]:
    """List what the names of metrics of each evaluation set begin with."""
    areas = []
    for name in splits.evaluations:
        if name:
            areas.append(f"eval/{name}/")
        else:
            areas.append("eval/")
    return areas


def _joined(areas: Sequence[str], names: Sequence[str]) -> list[str]:
    """List every name in every area, area by area."""
    return [f"{area}{name}" for area, name in product(areas, names)]


def _watched_in_evaluations(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and name of the metrics of evaluations that the run follows."""
    for key, metric in watched_metrics(config):
        if metric.startswith("eval/"):
            yield key, metric


def refuse_not_measured(config: RunConfig, names: Collection[str]) -> None:
    """Refuse metrics that the run follows and that an evaluation has not given.

    Raises:
        ConfigError: kind ``unknown-metric``.
    """
    known = sorted(name for name in names if name.startswith("eval/"))
    problems = []
    for key, metric in _watched_in_evaluations(config):
        if metric not in names:
            reason = "the evaluation does not give it"
            fix = f"write one of {', '.join(known)}"
            problems.append(Problem("unknown-metric", reason, fix, key, metric))
    if problems:
        raise ConfigError(problems)


def _is_given(metric: str, known: Sequence[str], areas: Sequence[str]) -> bool:
    """Check whether an evaluation gives a metric.

    Args:
        metric: its name.
        known: all names; empty if the task's metrics have none: then any within the areas counts.
        areas: what names of the evaluation sets begin with.
    """
    if known:
        return metric in known
    return metric.startswith(tuple(areas))
