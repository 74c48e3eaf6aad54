"""The plan that is nearest to one that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.plan.alternatives import settings_text, with_settings
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.plan.search_space import (
    ACCUMULATION,
    GLOBAL,
    MICRO,
    PIPE,
    TENSOR,
    Settings,
    powers_of_two,
)


def nearest_plan(
    config: RunConfig, cluster: Cluster, *, num_train_samples: int | None = None
) -> tuple[str, Plan] | None:
    """Return the plan that is nearest to one that cannot be, and what it changes, in words; None if
    no plan is near.

    Tried in this order: another micro-batch, ranks of tensor groups that share the samples, another
    global size, fewer pipeline stages, fewer devices.
    """
    for settings, tried_cluster in _near(config, cluster):
        with suppress(ConfigError):
            changed = with_settings(config, settings)
            plan = make_plan(changed, tried_cluster, num_train_samples=num_train_samples)
            return _changes_text(config, cluster, settings, plan), plan
    return None


def _near(config: RunConfig, cluster: Cluster) -> Iterator[tuple[Settings, Cluster]]:
    """Yield settings and clusters that are near to what a config has, the nearest first."""
    pipe = config.parallel.pipe
    yield from ((settings, cluster) for settings in _same_samples(config, cluster))
    for settings in _near_batches(config, max(cluster.world_size // pipe, 1)):
        yield settings, cluster
    for stages in range(pipe - 1, 0, -1):
        if cluster.world_size % stages == 0:
            for settings in _near_batches(config, cluster.world_size // stages):
                yield {PIPE: stages} | settings, cluster
    for count in range(cluster.devices_per_host - 1, 0, -1):
        yield {}, replace(cluster, devices_per_host=count)


def _same_samples(config: RunConfig, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield settings that keep the global size: another micro-batch, then with ranks of a host in
    tensor groups; none without a global size.
    """
    if config.batch.global_size is None:
        return
    free_batch = {MICRO: None, ACCUMULATION: None}
    yield {}
    yield free_batch
    if config.parallel.tensor == 1:
        for size in powers_of_two(cluster.devices_per_host):
            yield free_batch | {TENSOR: size}


def _near_batches(config: RunConfig, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield settings of near global sizes for data-parallel `ranks`, each with the config's
    micro-batch and then with any.
    """
    for sizes in _near_global_sizes(config, ranks):
        yield sizes
        yield sizes | {MICRO: None, ACCUMULATION: None}


def _near_global_sizes(config: RunConfig, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield no change, and the global sizes below and above that ranks share evenly."""
    yield {}
    global_size = config.batch.global_size
    if global_size is not None:
        below = global_size // ranks * ranks
        yield {GLOBAL: below or ranks}
        yield {GLOBAL: below + ranks}


def _changes_text(config: RunConfig, cluster: Cluster, settings: Settings, plan: Plan) -> str:
    """Describe what a plan changes: settings, else the cluster, else the layout."""
    changes = {key: value for key, value in settings.items() if value}
    micro_size = plan.layout.micro_size
    if MICRO in settings and config.batch.fixed_micro_size not in (None, micro_size):
        changes[MICRO] = micro_size
    if changes:
        return settings_text(changes)
    if plan.cluster != cluster:
        return str(plan.cluster)
    return str(plan.layout)
