"""When gradients are summed over the ranks once in a step."""

from __future__ import annotations

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.flat_sums import coalesces, waits
from framework.plan.plan import make_plan


@pytest.mark.parametrize(
    ("stage", "is_asked", "steps", "expected"),
    [
        (0, True, 4, (False, False)),
        # at stage 1 they wait anyway, and the key does nothing
        (1, True, 4, (False, True)),
        (2, True, 4, (True, True)),
        (2, True, 1, (False, False)),
        (2, False, 4, (False, False)),
        (3, True, 4, (False, False)),
    ],
)
def test_coalesced_sums_are_of_stage_2_alone(
    stage: int, is_asked: bool, steps: int, expected: tuple[bool, bool]
) -> None:
    config = config_from_values(
        {
            "zero": {"stage": stage, "coalesce": is_asked},
            "batch": {"micro_size": 1, "accumulation_steps": steps},
        }
    )
    layout = make_plan(config, Cluster(devices_per_host=2)).layout
    assert (coalesces(config, layout), waits(config, layout)) == expected
