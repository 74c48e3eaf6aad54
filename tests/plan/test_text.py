"""How a plan reads: the length of the run, and what ZeRO spreads where."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.plan.plan_text import one_line, rows

# 468 steps per epoch, 96 images left
FASHION = {"data": {"kind": "fashion_mnist"}, "batch": {"global_size": 128}}


def plan_of(values: dict[str, Any], devices: int = 1) -> Plan:
    return make_plan(config_from_values(values), Cluster(devices_per_host=devices))


@pytest.mark.parametrize(
    ("steps", "stated"),
    [
        (20, "20 steps = 0.04 epochs of 468"),
        (1, "1 step = less than 0.01 epochs of 468"),
        (468, "468 steps = 1 epoch of 468"),
        (1000, "1000 steps = 2.14 epochs of 468"),
        (467, "467 steps = 1.00 epochs of 468"),
        (936, "936 steps = 2 epochs of 468"),
    ],
)
def test_fractions_of_epochs_have_two_digits(steps: int, stated: str) -> None:
    plan = plan_of(FASHION | {"training": {"max_steps": steps}})
    assert rows(plan)["length"] == f"{stated}, 96 samples dropped per epoch"
    assert one_line(plan).endswith(f"data-parallel, {stated}, 96 samples dropped per epoch")


def test_a_length_that_is_not_known_yet_is_reported_once() -> None:
    plan = plan_of({"data": {"target": "a:b"}})
    assert rows(plan)["length"] == "known when the data is read"
    assert one_line(plan).endswith("data-parallel, length known when the data is read")
    assert (
        rows(plan_of({"data": {"target": "a:b"}, "training": {"max_steps": 5}}))["length"]
        == "5 steps"
    )


@pytest.mark.parametrize(
    ("zero", "devices", "stated"),
    [
        ({}, 2, "stage 0: nothing is spread"),
        ({"stage": 1}, 1, "stage 1: optimizer state is spread over 1 rank"),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            2,
            "stage 2: optimizer state and gradients are spread over 2 ranks, optimizer on cpu",
        ),
        (
            {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            4,
            "stage 3: optimizer state, gradients and weights are spread over 4 ranks, weights on nvme",
        ),
    ],
)
def test_what_is_spread_and_where_it_rests(zero: dict[str, Any], devices: int, stated: str) -> None:
    assert rows(plan_of({"zero": zero}, devices))["ZeRO"] == stated


def test_one_device_is_no_devices() -> None:
    assert rows(plan_of({}))["cluster"] == "1 device = 1 rank"
    assert rows(plan_of({}, 2))["cluster"] == "2 devices = 2 ranks"
