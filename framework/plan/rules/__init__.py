"""Rules between keys: each yields the problems it finds, under a stable kind.

A rule reads the config, the cluster and nothing else: no clock, environment or device. A new rule
is a row of `rules.json`, if settings do not go together and nothing has to be computed, or a
function under `@rule` in the module of its theme. Themes are loaded for configs that they concern.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

from framework.config.base import Target
from framework.config.optimizer import has_groups
from framework.config.paths import unexpanded_paths
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules import base, devices, model, schedule
from framework.plan.rules.base import LISTED, Rule, list_rows

list_rows()


def apply_rules(config: RunConfig, cluster: Cluster) -> list[Problem]:
    """Return all problems that the rules find."""
    problems: list[Problem] = []
    for module in _concerning(config):
        for rule in LISTED[module.__name__]:
            problems += rule(config, cluster)
    return problems


def all_rules() -> Sequence[Rule]:
    """Return the rules of all themes."""
    from framework.plan.rules import (
        inert_keys,
        metrics_and_ema,
        parallel,
        passthrough,
        paths,
        weights,
    )

    rules: list[Rule] = []
    for module in (
        devices,
        paths,
        metrics_and_ema,
        model,
        weights,
        parallel,
        passthrough,
        inert_keys,
        schedule,
        base,
    ):
        rules += LISTED[module.__name__]
    return rules


def _concerning(config: RunConfig) -> Iterator[ModuleType]:
    """Yield the modules with rules that may find something in a config, in the order of
    `all_rules`.
    """
    yield devices
    if any(unexpanded_paths(config)):
        from framework.plan.rules import paths

        yield paths
    if _names_metrics(config):
        from framework.plan.rules import metrics_and_ema

        yield metrics_and_ema
    yield model
    if _trains_weights_apart(config):
        from framework.plan.rules import weights

        yield weights
    if _is_divided(config):
        from framework.plan.rules import parallel

        yield parallel
    if config.deepspeed:
        from framework.plan.rules import inert_keys, passthrough

        yield passthrough
        yield inert_keys
    yield schedule
    yield base


def _trains_weights_apart(config: RunConfig) -> bool:
    """Check whether some weights are frozen, adapted or in an optimizer's group of their own."""
    training = config.training
    if training.freeze or training.lora is not None:
        return True
    return has_groups(config.optimizer)


def _is_divided(config: RunConfig) -> bool:
    """Check whether ranks share a model, or may share its experts."""
    if max(*config.parallel.sizes().values(), config.parallel.expert) > 1:
        return True
    return bool(getattr(config.model, "moe", None))


def _names_metrics(config: RunConfig) -> bool:
    """Check whether a config names metrics, or services that may be given credentials."""
    if config.checkpoint.keep_best is not None:
        return True
    if config.monitors.mlflow is not None or config.monitors.others:
        return True
    return any(not isinstance(callback, Target) for callback in config.callbacks)
