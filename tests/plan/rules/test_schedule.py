"""A cycle of the learning rate that stands on its head, or that the run is too short for; and a
profile that it is too short for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.rules.schedule import cycled_momentum
from framework.setup.handed_over import config_with_objects
from framework.setup.user_code import Objects


def findings(*, steps: int = 44, **cycle: Any) -> list[tuple[str, str]]:
    scheduler = {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1.0, **cycle}
    values = {"scheduler": scheduler, "training": {"max_steps": steps}}
    try:
        plan = make_plan(config_from_values(values), Cluster())
    except ConfigError as error:
        return [(problem.kind, problem.key) for problem in error.problems]
    assert all(finding.severity == "warning" for finding in plan.findings)
    return [(finding.kind, finding.fix) for finding in plan.findings]


@pytest.mark.parametrize(
    ("cycle", "key"),
    [
        ({"min_lr": 1.0, "max_lr": 0.1}, "scheduler.min_lr"),
        (
            {"cycle_momentum": True, "min_momentum": 0.9, "max_momentum": 0.8},
            "scheduler.min_momentum",
        ),
    ],
)
def test_a_cycle_on_its_head_is_refused(cycle: dict[str, Any], key: str) -> None:
    assert findings(first_steps=10, **cycle) == [("upside-down", key)]


@pytest.mark.parametrize("cycle", [{"min_lr": 1.0}, {"min_momentum": 0.9, "max_momentum": 0.8}])
def test_what_is_level_or_not_used_is_fine(cycle: dict[str, Any]) -> None:
    assert findings(first_steps=10, **cycle) == []


def test_betas_of_an_optimizer_that_is_handed_over_are_not_known() -> None:
    scheduler = {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1.0, "cycle_momentum": True}
    values = {"scheduler": scheduler, "training": {"max_steps": 4000}}
    config = config_with_objects(values, Objects(optimizer=torch.optim.SGD))
    assert list(cycled_momentum(config, Cluster())) == []


@pytest.mark.parametrize(
    ("steps", "cycle", "fix"),
    [
        (44, {}, "set scheduler.first_steps: 22"),  # the default way up is 2,000 steps
        (44, {"first_steps": 44}, "set scheduler.first_steps: 22"),
        (44, {"first_steps": 43}, "set scheduler.first_steps: 22, or second_steps"),
        (44, {"first_steps": 23}, "set scheduler.first_steps: 22, or second_steps"),
        (44, {"first_steps": 22}, None),
        (44, {"first_steps": 40, "second_steps": 4}, None),
        (
            44,
            {"first_steps": 40, "second_steps": 5},
            "set scheduler.first_steps: 22, or second_steps",
        ),
        (4000, {}, None),
    ],
)
def test_a_run_that_ends_within_the_cycle_is_warned_of(
    steps: int, cycle: dict[str, Any], fix: str | None
) -> None:
    assert findings(steps=steps, **cycle) == ([("cycle-too-long", fix)] if fix else [])


@pytest.mark.parametrize(
    ("steps", "reason"), [("45-50", "never reaches them"), ("40-45", "never reaches the last of")]
)
def test_a_profile_beyond_the_run_is_seen(steps: str, reason: str) -> None:
    values = {"profile": {"steps": steps}, "training": {"max_steps": 44}}
    (finding,) = make_plan(config_from_values(values), Cluster()).findings
    assert (finding.kind, finding.severity, finding.key) == (
        "profile-beyond-run",
        "warning",
        "profile.steps",
    )
    assert reason in finding.reason
    assert (
        make_plan(config_from_values(values | {"profile": {"steps": "44"}}), Cluster()).findings
        == ()
    )
