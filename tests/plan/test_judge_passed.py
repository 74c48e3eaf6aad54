"""`check` judges a rendering only where something passes through it: all others have no problems."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.plan.cluster import Cluster, Device
from framework.plan.judge_passed import judge_rendered
from framework.plan.plan import make_plan
from tests.plan.rules.cases import CASES

OPTIMIZERS = ("adamw", "adam", "sgd", "adagrad", "lion", "lamb", "adafactor", "muon")
SCHEDULERS = ("constant", "cosine", "warmup", "warmup_decay", "one_cycle", "lr_range_test")
PRECISIONS = ("fp32", "fp16", "bf16", "autocast")
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def kinds_in_rendering(values: dict[str, Any], device: Device) -> set[str] | None:
    """Return the kinds of problems in what a config renders to; None for configs that are refused
    or that pass keys through.
    """
    try:
        config = config_from_values(values)
        plan = make_plan(config, Cluster(devices_per_host=8, device=device))
    except ConfigError:
        return None
    if config.deepspeed:
        return None
    return {problem.kind for problem in judge_rendered(plan)}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_rendering_of_our_own_keys_has_no_problems(device: Device, exhaustive: bool) -> None:
    """Without --exhaustive a fifth of the products is tried: every pair of values is in it."""
    all_values: list[dict[str, Any]] = [
        values for cases in CASES.values() for values, _, _ in cases
    ]
    products = [*product(OPTIMIZERS, SCHEDULERS, PRECISIONS, range(4), ("none", "cpu"))]
    for optimizer, scheduler, dtype, stage, offload in products[:: 1 if exhaustive else 5]:
        all_values.append(
            {
                "optimizer": {"kind": optimizer},
                "scheduler": {"kind": scheduler},
                "precision": {"dtype": dtype},
                "zero": {"stage": stage, "offload_optimizer": {"device": offload}},
                "training": {"max_steps": 3000},
            }
        )
    num_rendered = 0
    for values in all_values:
        kinds = kinds_in_rendering(values, device)
        if kinds is not None:
            assert kinds == set(), values
            num_rendered += 1
    assert num_rendered > (500 if exhaustive else 200)
