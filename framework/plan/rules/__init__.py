"""Rules between keys: each is a small function that yields the problems it sees, under a stable kind.

A rule knows the config, the cluster and nothing else: it reads no file, clock, environment or device. A new one is a
function under `@rule` in the module of its theme. `ALL` lists them in the order in which they are reported.
"""

from __future__ import annotations

from typing import Final

from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules import devices, metrics_and_ema, model, passthrough, schedule
from framework.plan.rules.base import LISTED, Rule

_THEMES: Final = [theme.__name__ for theme in (devices, schedule, model, metrics_and_ema, passthrough)]
ALL: Final[tuple[Rule, ...]] = tuple(sorted(LISTED, key=lambda rule: _THEMES.index(rule.__module__)))


def apply_rules(config: RunConfig, cluster: Cluster) -> list[Problem]:
    """Everything that every rule sees."""
    return [problem for rule in ALL for problem in rule(config, cluster)]
