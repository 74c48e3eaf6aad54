"""The cosine schedule against torch's own schedulers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from framework.config.load import config_from_values
from framework.engine.initialize import CosineSchedule, client_schedule, cosine_factor
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], lr=1.0)


def factors(total: int, *, warmup: int, min_ratio: float) -> list[float]:
    return [cosine_factor(t, warmup_steps=warmup, total_steps=total, min_ratio=min_ratio) for t in range(total + 3)]


@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7, 50])
def test_without_warm_up_it_is_cosine_annealing(total: int, min_ratio: float) -> None:
    sgd = optimizer(0.5)
    oracle = CosineAnnealingLR(sgd, T_max=total, eta_min=0.5 * min_ratio)
    ours = factors(total, warmup=0, min_ratio=min_ratio)
    for step in range(total + 1):
        assert 0.5 * ours[step] == pytest.approx(oracle.get_last_lr()[0], abs=1e-12)
        sgd.step()
        oracle.step()


@pytest.mark.parametrize(("warmup", "total"), [(1, 10), (5, 20), (11, 220), (19, 20)])
def test_with_warm_up_it_is_linear_and_then_cosine(warmup: int, total: int) -> None:
    """LinearLR counts W - 1 intervals from 1 / W to 1; the step after them is the cosine's first, at the full rate."""
    sgd = optimizer(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts with an epoch
        linear = LinearLR(sgd, start_factor=1 / warmup, end_factor=1.0, total_iters=max(1, warmup - 1))
        oracle = SequentialLR(sgd, [linear, CosineAnnealingLR(sgd, T_max=total - warmup)], milestones=[warmup])
        ours = factors(total, warmup=warmup, min_ratio=0.0)
        for step in range(total + 1):
            assert ours[step] == pytest.approx(oracle.get_last_lr()[0], abs=1e-9), step
            sgd.step()
            oracle.step()


@given(warmup=st.integers(0, 40), total=st.integers(1, 60), min_ratio=st.floats(0, 1), step=st.integers(0, 100))
def test_no_rate_is_zero_before_the_end_nor_above_one(warmup: int, total: int, min_ratio: float, step: int) -> None:
    factor = cosine_factor(step, warmup_steps=warmup, total_steps=total, min_ratio=min_ratio)
    assert 0.0 <= factor <= 1.0
    if step < max(total, warmup):
        assert factor > 0.0
    if step >= max(total, warmup + 1):
        assert factor == pytest.approx(min_ratio)


def test_every_group_keeps_its_share() -> None:
    sgd = optimizer(1.0, 0.1)
    schedule = CosineSchedule(sgd, factor=lambda step: 1 / (step + 1))
    assert schedule.get_last_lr() == [1.0, 0.1]
    schedule.step()
    assert schedule.get_lr() == [0.5, 0.05]
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.05]


def test_a_restored_position_is_the_rate_of_that_step() -> None:
    first = CosineSchedule(optimizer(0.3), factor=lambda step: math.exp(-step))
    for _ in range(5):
        first.step()
    second = CosineSchedule(optimizer(0.3), factor=lambda step: math.exp(-step))
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()


def plan(scheduler: dict[str, Any], **training: Any) -> Any:
    values = {"scheduler": scheduler, "training": training, "batch": {"global_size": 120}}
    return make_plan(config_from_values(values), Cluster())


def test_its_length_is_the_runs_or_as_asked() -> None:
    for section, length in (({}, 22), ({"total_steps": 10}, 10)):
        make = client_schedule(plan({"kind": "cosine", "warmup_steps": 2, "min_ratio": 0.25} | section, max_epochs=2))
        assert make is not None
        schedule = make(optimizer(1.0))
        rates = []
        for _ in range(30):
            rates.append(schedule.get_last_lr()[0])
            schedule.step()
        assert rates[:3] == [0.5, 1.0, 1.0]
        assert rates.index(0.25) == length


def test_the_other_kinds_are_not_ours() -> None:
    assert client_schedule(plan({"kind": "constant"}, max_epochs=1)) is None
    assert client_schedule(plan({"kind": "warmup_cosine", "warmup_steps": 2}, max_epochs=1)) is None
