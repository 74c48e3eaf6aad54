"""Rules between keys: each yields the problems it sees, under a stable kind.

A rule knows the config, the cluster and nothing else: it reads no clock, environment or device. A
new one is a row of `rules.json`, where settings do not go together and nothing has to be computed,
or a function under `@rule` in the module of its theme.
"""

from __future__ import annotations

from typing import Final

from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules import devices, metrics_and_ema, model, passthrough, schedule, tensor  # noqa: F401
from framework.plan.rules.base import LISTED, Rule, list_rows

list_rows()
ALL: Final[tuple[Rule, ...]] = tuple(LISTED)


def apply_rules(config: RunConfig, cluster: Cluster) -> list[Problem]:
    """Everything that every rule sees."""
    return [problem for rule in ALL for problem in rule(config, cluster)]
