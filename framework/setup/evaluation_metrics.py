"""Metrics of torchmetrics that a config names, or that were handed over from Python."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from framework.config.run_config import RunConfig
from framework.errors import ConfigError, missing_package
from framework.setup.user_code import call_factory, type_name


def added_metrics(config: RunConfig, handed_over: Any) -> dict[str, Any]:
    """Build the metrics of `evaluation.metrics`, and add those that were handed over.

    Args:
        config: of the run.
        handed_over: a Metric; a MetricCollection, which has names of its own; or a mapping of
            several by name.

    Returns:
        Name -> metric; a collection without a name is under "".

    Raises:
        ConfigError: kinds ``package-missing``, ``metric-target-result``; or the target cannot be
            called.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        raise missing_package("torchmetrics", what="evaluation.metrics", extra="metrics")
    from torchmetrics import Metric, MetricCollection

    metrics: dict[str, Any] = {}
    for name, section in config.evaluation.metrics.items():
        key = f"evaluation.metrics.{name}"
        metrics[name] = call_factory(section.factory(), key=key)
        if not isinstance(metrics[name], Metric | MetricCollection):
            raise _not_a_metric(metrics[name], f"{key}.target", section.target)
    if isinstance(handed_over, MetricCollection):
        given: Mapping[str, Any] = {"": handed_over}
    else:
        given = _by_name(handed_over)
    for name, metric in given.items():
        if not isinstance(metric, Metric | MetricCollection):
            raise _not_a_metric(metric, "metrics", name)
        metrics[name] = metric
    return metrics


def _by_name(handed_over: Any) -> Mapping[str, Any]:
    """Return metrics that were handed over by name: a mapping, or one under its class's name."""
    if handed_over is None:
        return {}
    if isinstance(handed_over, Mapping):
        return handed_over
    return {type(handed_over).__name__: handed_over}


def _not_a_metric(value: Any, key: str, shown: str) -> ConfigError:
    return ConfigError.of(
        "metric-target-result",
        f"a {type_name(value)} is no torchmetrics.Metric",
        "name a class of torchmetrics; figures of your own come from Task.collect and Task.finish",
        key,
        shown,
    )
