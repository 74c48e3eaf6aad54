"""Optimizers of users on small matrices: which of them ZeRO may give shares of one flat vector."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from framework.config.base import plain_values
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.setup.objects import Objects
from framework.setup.parts import _given_optimizer, gather_parts
from framework.setup.user_optimizer import check_optimizer

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Own(optim.Optimizer):
    """Takes the step that a function says."""

    def __init__(self, parameters: Iterable[torch.Tensor], step: Step, lr: float = 0.1) -> None:
        self._step = step
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self._step(parameter, parameter.grad))


class Sam(Own):
    """Fails without a closure that its signature leaves out."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        super().step()


def shampoo(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.ndim < 2:
        return gradient
    values, vectors = torch.linalg.eigh(gradient @ gradient.T + torch.eye(len(gradient)))
    return vectors @ torch.diag(values**-0.25) @ vectors.T @ gradient


def lars(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * weight.norm() / gradient.norm()


def lion(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.sign() + 0.1 * weight


def noisy(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 0.0 * torch.randn_like(weight)


def draws(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient + torch.randn_like(weight)


def judge(make: Any, *, stage: int) -> str:
    try:
        check_optimizer(_given_optimizer(make), stage=stage, key="optimizer", value="mine")
    except ConfigError as error:
        return error.problems[0].kind
    return ""


NAMES = ("SGD", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adam", "AdamW", "Adamax", "Adadelta", "ASGD", "Rprop")


@pytest.mark.parametrize("lr", [1e-8, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_what_works_number_by_number_is_taken(name: str, lr: float) -> None:
    assert judge(partial(getattr(optim, name), lr=lr), stage=3) == ""


@pytest.mark.parametrize("step", [lion, noisy])
def test_also_of_ones_own_and_no_generator_is_moved(step: Step) -> None:
    before = torch.get_rng_state(), random.getstate()
    assert judge(partial(Own, step=step), stage=2) == ""
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    "make", [optim.Adafactor, optim.Muon, partial(Own, step=shampoo), partial(Own, step=lars, lr=1e-6)]
)
def test_what_looks_at_a_whole_weight_is_refused_at_stages_1_to_3(make: Any) -> None:
    assert [judge(make, stage=stage) for stage in range(4)] == ["", *["optimizer-sees-shape"] * 3]


@pytest.mark.parametrize("make", [optim.LBFGS, partial(Sam, step=lion)])
def test_closures_are_refused_at_every_stage(make: Any) -> None:
    assert {judge(make, stage=stage) for stage in range(4)} == {"optimizer-needs-closure"}


def test_what_cannot_be_tried_is_not_judged() -> None:
    model = torch.nn.Linear(3, 3)
    before = model.weight.detach().clone()

    def of_the_model(parameters: Any) -> optim.Optimizer:
        return Own(model.parameters(), step=shampoo)

    def wants_many(parameters: Any) -> optim.Optimizer:
        return Own([parameters[index] for index in range(5)], step=shampoo)

    stranger: list[Any] = [of_the_model, wants_many, optim.SparseAdam, partial(Own, step=draws)]
    assert [judge(make, stage=2) for make in stranger] == [""] * 4
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("target", ["torch.optim:Adafactor", "torch.optim:LBFGS"])
def test_parts_are_refused_before_the_start(target: str) -> None:
    config = config_from_values(plain_values({"zero": {"stage": 1}, "optimizer": {"target": target}}))
    with pytest.raises(ConfigError) as caught:
        gather_parts(config, Objects())
    problem = caught.value.problems[0]
    assert (problem.key, problem.value) == ("optimizer.target", target)
    assert problem.kind.startswith("optimizer-")
