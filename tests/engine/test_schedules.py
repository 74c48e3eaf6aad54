"""Our schedules against torch's own, and schedules of the user's own."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from framework.config.load import config_from_values
from framework.config.optimizer import WSD, Constant, Cosine, Linear, Polynomial
from framework.engine.schedules import OwnSchedule, StepSchedule, client_schedule, factor
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.setup.handed_over import config_with_objects
from framework.setup.prepare_run import prepare
from framework.setup.user_code import Objects


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], lr=1.0
    )


def factors(total: int, *, warmup: int, min_ratio: float) -> list[float]:
    return rates(Cosine(warmup_steps=warmup, min_ratio=min_ratio), total)


def rates(section: Constant, total: int) -> list[float]:
    return [factor(section, step, total) for step in range(total + 3)]


def rates_of_torch(oracle: LRScheduler, total: int) -> list[float]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts with an epoch
        for _ in range(total):
            found.append(oracle.get_last_lr()[0])
            oracle.optimizer.step()
            oracle.step()
    return found


@pytest.mark.parametrize(("cycles", "total"), [(1, 12), (2, 12), (3, 12), (7, 49)])
def test_cycles_are_warm_restarts(cycles: int, total: int) -> None:
    oracle = CosineAnnealingWarmRestarts(optimizer(1.0), T_0=total // cycles)
    found = rates(Cosine(cycles=cycles), total)
    assert found[:total] == pytest.approx(rates_of_torch(oracle, total), abs=1e-12)
    assert found[total:] == [0.0] * 3


@pytest.mark.parametrize("power", [1.0, 0.5, 3.0])
def test_a_polynomial_is_torchs(power: float) -> None:
    oracle = PolynomialLR(optimizer(1.0), total_iters=20, power=power)
    found = rates(Polynomial(power=power), 20)
    assert found == pytest.approx(rates_of_torch(oracle, 23), abs=1e-12)


def test_linear_is_torchs() -> None:
    oracle = PolynomialLR(optimizer(1.0), total_iters=20, power=1.0)
    assert rates(Linear(), 20) == pytest.approx(rates_of_torch(oracle, 23), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "total", "steps"), [(0.1, 100, 10), (0.03, 50, 2), (0.0, 50, 0), (0.99, 3, 3)]
)
@pytest.mark.parametrize("kind", [Constant, Cosine, Linear, Polynomial])
def test_a_warmup_of_a_share_is_one_of_so_many_steps(
    kind: type[Constant], ratio: float, total: int, steps: int
) -> None:
    """Rounded up, as the Trainer of transformers does (`get_warmup_steps`)."""
    found = rates(kind(warmup_ratio=ratio), total)
    assert found == rates(kind(warmup_steps=steps), total)


def test_stable_and_then_down() -> None:
    sgd = optimizer(1.0)
    parts = [
        ConstantLR(sgd, factor=1.0),
        LinearLR(sgd, start_factor=1.0, end_factor=0.1, total_iters=8),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = SequentialLR(sgd, parts, milestones=[12])
    found = rates(WSD(decay_steps=8, min_ratio=0.1), 20)
    assert found == pytest.approx(rates_of_torch(oracle, 23), abs=1e-9)
    for curve, half in (("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)):
        found = rates(WSD(decay_steps=8, curve=curve), 20)
        assert found[:13] == [1.0] * 13
        assert found[16] == pytest.approx(half)
        assert found[20:] == [0.0] * 3


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
    """LinearLR counts W - 1 intervals from 1 / W to 1; the step after them is the cosine's first,
    at the full rate.
    """
    sgd = optimizer(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts with an epoch
        linear = LinearLR(
            sgd, start_factor=1 / warmup, end_factor=1.0, total_iters=max(1, warmup - 1)
        )
        oracle = SequentialLR(
            sgd, [linear, CosineAnnealingLR(sgd, T_max=total - warmup)], milestones=[warmup]
        )
        ours = factors(total, warmup=warmup, min_ratio=0.0)
        for step in range(total + 1):
            assert ours[step] == pytest.approx(oracle.get_last_lr()[0], abs=1e-9), step
            sgd.step()
            oracle.step()


@given(
    warmup=st.integers(0, 40),
    total=st.integers(1, 60),
    min_ratio=st.floats(0, 1),
    step=st.integers(0, 100),
)
def test_no_rate_is_zero_before_the_end_nor_above_one(
    warmup: int, total: int, min_ratio: float, step: int
) -> None:
    share = factor(Cosine(warmup_steps=warmup, min_ratio=min_ratio), step, total)
    assert 0.0 <= share <= 1.0
    if step < max(total, warmup):
        assert share > 0.0
    if step >= max(total, warmup + 1):
        assert share == pytest.approx(min_ratio)


def test_every_group_keeps_its_share() -> None:
    sgd = optimizer(1.0, 0.1)
    schedule = StepSchedule(sgd, factor=lambda step: 1 / (step + 1))
    assert schedule.get_last_lr() == [1.0, 0.1]
    schedule.step()
    assert schedule.get_lr() == [0.5, 0.05]
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.05]


def test_a_restored_position_is_the_rate_of_that_step() -> None:
    first = StepSchedule(optimizer(0.3), factor=lambda step: math.exp(-step))
    for _ in range(5):
        first.step()
    second = StepSchedule(optimizer(0.3), factor=lambda step: math.exp(-step))
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
        make = client_schedule(
            plan({"kind": "cosine", "warmup_steps": 2, "min_ratio": 0.25} | section, max_epochs=2),
            None,
        )
        assert make is not None
        schedule = make(optimizer(1.0))
        rates = []
        for _ in range(30):
            rates.append(schedule.get_last_lr()[0])
            schedule.step()
        assert rates[:3] == [0.5, 1.0, 1.0]
        assert rates.index(0.25) == length


def test_the_other_kinds_are_not_ours() -> None:
    assert client_schedule(plan({"kind": "constant"}, max_epochs=1), None) is None
    assert (
        client_schedule(plan({"kind": "warmup_cosine", "warmup_steps": 2}, max_epochs=1), None)
        is None
    )


def test_a_warm_up_alone_and_one_over_the_root_need_no_length() -> None:
    for section in (
        {"kind": "constant", "warmup_steps": 4},
        {"kind": "inverse_sqrt", "warmup_steps": 4},
    ):
        values = {"scheduler": section, "training": {"max_epochs": 1}, "data": {"target": "x:y"}}
        make = client_schedule(make_plan(config_from_values(values), Cluster()), None)
        assert make is not None
        assert make(optimizer(1.0)).get_last_lr() == [0.25]


def test_one_of_ones_own_goes_on_with_all_that_it_moves() -> None:
    def own(**args: Any) -> OwnSchedule:
        weights = [torch.nn.Parameter(torch.zeros(1))]
        made = torch.optim.AdamW(weights, lr=0.1, betas=(0.9, 0.99))
        return OwnSchedule(
            made, make=lambda given: OneCycleLR(given, max_lr=1.0, total_steps=20, **args)
        )

    first, second = own(), own()
    first.optimizer.step()
    second.optimizer.step()
    for _ in range(5):
        first.step()
    state = first.state_dict()
    second.load_state_dict(state)
    for _ in range(5):
        assert {**second.optimizer.param_groups[0], "params": 0} == {
            **first.optimizer.param_groups[0],
            "params": 0,
        }
        first.step()
        second.step()
    second.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(
        ConfigError, match=r"1 parameter groups were saved, here are 2; .*schedule-groups"
    ):
        second.load_state_dict(state)


NOT_SCHEDULES = {
    "it returned builtins.int, which has no step()": lambda given: 3,
    "its step needs a metric": ReduceLROnPlateau,
    "calling it with an optimizer failed: TypeError": OneCycleLR,
    "its state_dict() holds what no checkpoint could give back": lambda given: with_state(
        LambdaLR(given, float)
    ),
}


def with_state(schedule: LRScheduler) -> LRScheduler:
    schedule.made_by = NOT_SCHEDULES.keys()  # type: ignore[attr-defined]
    return schedule


@pytest.mark.parametrize("reason", NOT_SCHEDULES)
def test_what_is_no_schedule_is_refused_before_the_start(reason: str, tmp_path: Path) -> None:
    objects = Objects(scheduler=NOT_SCHEDULES[reason])
    config = config_with_objects({"run": {"output_dir": str(tmp_path)}}, objects)
    with pytest.raises(ConfigError) as caught:
        prepare(config, objects=objects)
    (problem,) = caught.value.problems
    assert problem.kind == "schedule-target-result"
    assert problem.reason.startswith(reason)


def test_a_target_is_looked_at_before_the_start(tmp_path: Path) -> None:
    for target, args, kind in (
        ("torch.optim.lr_scheduler:StepLr", {}, "target-not-found"),
        ("torch.optim.lr_scheduler:StepLR", {"size": 3}, "target-args"),
    ):
        section = {
            "scheduler": {"target": target, "args": args},
            "run": {"output_dir": str(tmp_path)},
        }
        with pytest.raises(ConfigError) as caught:
            prepare(config_from_values(section))
        assert [problem.kind for problem in caught.value.problems] == [kind]
