"""Rules between keys: each yields the problems it finds, under a stable kind.

A rule reads the config, the cluster and nothing else: no clock, environment or device. A new rule
is a row of `rules.json`, if settings do not go together and nothing has to be computed, or a
function under `@rule` in the module of its theme.
"""

from __future__ import annotations

from typing import Final

from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules import (  # noqa: F401
    devices,
    metrics_and_ema,
    model,
    passthrough,
    schedule,
    tensor,
)
from framework.plan.rules.base import LISTED, Rule, list_rows

list_rows()
ALL: Final[tuple[Rule, ...]] = tuple(LISTED)


def apply_rules(config: RunConfig, cluster: Cluster) -> list[Problem]:
    """Return all problems that the rules find."""
    return [problem for rule in ALL for problem in rule(config, cluster)]
