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
from framework.setup.components import gather_parts
from framework.setup.optimizer_makers import handed_over_optimizer
from framework.setup.optimizer_probe import _KNOWN, check_optimizer
from framework.setup.user_code import Objects

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Own(optim.Optimizer):
    """Takes the step that a function computes."""

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
        check_optimizer(handed_over_optimizer(make), stage=stage, key="optimizer", value="mine")
    except ConfigError as error:
        return error.problems[0].kind
    return ""


NAMES = (
    "SGD",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
)


# A small rate changes the last bits of a number alone, whatever the optimizer.
SMALL_RATE = [
    pytest.param(name, 1e-8, marks=pytest.mark.exhaustive) for name in NAMES if name != "Adam"
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lr"), [*((name, 0.1) for name in NAMES), ("Adam", 1e-8), *SMALL_RATE]
)
def test_what_works_number_by_number_is_taken(name: str, lr: float) -> None:
    """Torch's own ones are known: a class of the user's own is tried to the end."""
    kind = getattr(optim, name)
    assert kind in _KNOWN
    assert judge(partial(kind, lr=lr), stage=3) == ""
    assert judge(partial(type("Own", (kind,), {}), lr=lr), stage=3) == ""


def clipped_by_all(parameters: Iterable[torch.Tensor]) -> optim.Optimizer:
    """Return SGD of torch with a hook that clips the norm of all gradients."""
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def clip(optimizer: optim.Optimizer, arguments: Any, options: Any) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 1e-3)


def stepping_by_norm(parameters: Iterable[torch.Tensor]) -> optim.Optimizer:
    """Return the same with another function in the place of its step."""
    optimizer = optim.SGD(parameters, lr=0.1)
    plain_step = optimizer.step

    def step(closure: Any = None) -> None:
        clip(optimizer, (), {})
        plain_step()

    optimizer.step = step  # type: ignore[method-assign, assignment]
    return optimizer


@pytest.mark.parametrize("make", [clipped_by_all, stepping_by_norm])
def test_what_is_put_around_a_known_step_is_tried(make: Any) -> None:
    assert judge(make, stage=1) == "optimizer-sees-shape"


@pytest.mark.slow
@pytest.mark.parametrize("step", [lion, noisy])
def test_also_of_ones_own_and_no_generator_is_moved(step: Step) -> None:
    before = torch.get_rng_state(), random.getstate()
    assert judge(partial(Own, step=step), stage=2) == ""
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    "make",
    [optim.Adafactor, optim.Muon, partial(Own, step=shampoo), partial(Own, step=lars, lr=1e-6)],
)
def test_what_looks_at_a_whole_weight_is_refused_at_stages_1_to_3(make: Any) -> None:
    assert [judge(make, stage=stage) for stage in range(4)] == ["", *["optimizer-sees-shape"] * 3]


@pytest.mark.parametrize("make", [optim.LBFGS, partial(Sam, step=lion)])
def test_closures_are_refused_at_every_stage(make: Any) -> None:
    assert {judge(make, stage=stage) for stage in range(4)} == {"optimizer-needs-closure"}


@pytest.mark.slow
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
    config = config_from_values(
        plain_values({"zero": {"stage": 1}, "optimizer": {"target": target}})
    )
    with pytest.raises(ConfigError) as caught:
        gather_parts(config, Objects())
    problem = caught.value.problems[0]
    assert (problem.key, problem.value) == ("optimizer.target", target)
    assert problem.kind.startswith("optimizer-")


class AllWeights(optim.Optimizer):
    """Looks at all weights of its groups: `step` takes lists of weights, gradients and the states
    of a group.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], step: Any, lr: float = 1e-2) -> None:
        self._step = step
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                self.state[parameter].setdefault("start", parameter.clone())
                self.state[parameter].setdefault("mean", torch.zeros_like(parameter)).lerp_(
                    parameter.grad, 0.1
                )
            self._step(self, group)


def take(optimizer: AllWeights, group: dict[str, Any], rate: float = 1.0) -> None:
    for parameter in group["params"]:
        parameter.sub_(group["lr"] * rate * optimizer.state[parameter]["mean"])


def estimates_its_rate(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """As D-Adaptation and Prodigy do: it begins at almost nothing."""
    moved = sum(
        float((one.grad * (optimizer.state[one]["start"] - one)).sum()) for one in group["params"]
    )
    group["sum"] = group.get("sum", 0.0) + moved
    size = sum(float(one.grad.abs().sum()) for one in group["params"])
    group["d"] = max(group.get("d", 1e-6), group["sum"] / size)
    take(optimizer, group, rate=group["d"])


def clips_all(optimizer: AllWeights, group: dict[str, Any]) -> None:
    norm = sum(float(one.grad.square().sum()) for one in group["params"]) ** 0.5
    take(optimizer, group, rate=min(1.0, 1.0 / norm))


def clips_each_from_step_40(optimizer: AllWeights, group: dict[str, Any]) -> None:
    for one in group["params"]:
        norm = float(optimizer.state[one]["mean"].norm())
        rate = min(1.0, 0.1 / norm) if group["k"] > 40 else 1.0
        one.sub_(group["lr"] * rate * optimizer.state[one]["mean"])


def keeps_a_sum(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """Uses it only much later."""
    group["norm"] = torch.stack([one.grad.square().sum() for one in group["params"]]).sum()
    take(optimizer, group, rate=1.0 if group["k"] < 5000 else 1.0 / float(group["norm"]))


def projects(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """As SGDP: where a gradient stands nearly upright on its weight."""
    for one in group["params"]:
        step = one.grad
        along = float((one * one.grad).sum() / (one.norm() * one.grad.norm()))
        if abs(along) < 0.1 / one.numel() ** 0.5:
            step = step - one * (one * step).sum() / one.norm() ** 2
        one.sub_(group["lr"] * step)


def factors_large_ones(optimizer: AllWeights, group: dict[str, Any]) -> None:
    for one in group["params"]:
        step = optimizer.state[one]["mean"]
        is_large = one.ndim > 1 and min(one.shape) >= 128
        one.sub_(group["lr"] * (step / step.norm(dim=1, keepdim=True) if is_large else step))


def noisy_norms(optimizer: AllWeights, group: dict[str, Any]) -> None:
    for one in group["params"]:
        noise = torch.randn_like(one) * 1e-3
        one.sub_(group["lr"] * (optimizer.state[one]["mean"] * one.norm() + noise))


def one_draw_for_each(optimizer: AllWeights, group: dict[str, Any]) -> None:
    for one in group["params"]:
        one.sub_(group["lr"] * optimizer.state[one]["mean"] * torch.rand(()))


def clips_at_a_thousand(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """A bound that no gradient of the trial reaches."""
    norm = sum(float(one.grad.square().sum()) for one in group["params"]) ** 0.5
    take(optimizer, group, rate=min(1.0, 1000.0 / norm))


def leaves_out_peaks(optimizer: AllWeights, group: dict[str, Any]) -> None:
    norm = torch.nn.utils.get_total_norm([one.grad for one in group["params"]])
    mean = group.setdefault("mean_norm", float(norm))
    group["mean_norm"] = 0.9 * mean + 0.1 * float(norm)
    take(optimizer, group, rate=0.0 if norm > 200.0 * mean else 1.0)


def trusts_all(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """One ratio of norms for all weights, of at most 1, as it is here at every step."""
    weights = sum(float(one.square().sum()) for one in group["params"]) ** 0.5
    means = sum(float(optimizer.state[one]["mean"].square().sum()) for one in group["params"])
    take(optimizer, group, rate=min(1.0, weights / max(means**0.5, 1e-12)))


def bounds_each(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """As Adafactor and StableAdamW: an update of at most a root mean square."""
    for one in group["params"]:
        size = float(one.grad.square().mean().sqrt())
        one.sub_(group["lr"] * one.grad / max(1.0, size / 100.0))


SEES_ALL = [
    *(clips_at_a_thousand, leaves_out_peaks, trusts_all, bounds_each),
    *(estimates_its_rate, clips_all, clips_each_from_step_40, keeps_a_sum, projects),
    *(factors_large_ones, noisy_norms, one_draw_for_each),
]


@pytest.mark.slow
@pytest.mark.parametrize("step", SEES_ALL)
def test_what_looks_at_many_numbers_is_refused_however_late_it_shows(step: Any) -> None:
    make = partial(AllWeights, step=step)
    assert [judge(make, stage=stage) for stage in (0, 1)] == ["", "optimizer-sees-shape"]


def masked(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (torch.rand_like(weight) < 0.5) + 0.01 * torch.empty_like(weight).normal_(
        0, 0.1
    )


def dropped(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * torch.empty_like(weight).bernoulli_(0.7)


@pytest.mark.slow
@pytest.mark.parametrize("step", [masked, dropped, draws])
def test_a_draw_for_each_number_is_no_reason_to_refuse(step: Step) -> None:
    assert judge(partial(Own, step=step), stage=2) == ""


def test_a_rate_that_a_schedule_gives_is_no_reason_to_pass() -> None:
    assert judge(partial(AllWeights, step=clips_all, lr=0.0), stage=2) == "optimizer-sees-shape"


def in_two_groups(parameters: Any, kind: Any = optim.AdamW, **options: Any) -> optim.Optimizer:
    vectors = [one for one in parameters if one.ndim < 2]
    matrices = [one for one in parameters if one.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    made: optim.Optimizer = kind([group for group in groups if group["params"]], **options)
    return made


@pytest.mark.slow
def test_groups_by_shape_are_made_of_the_models_weights_but_at_stage_3() -> None:
    assert [judge(in_two_groups, stage=stage) for stage in range(4)] == [
        "",
        "",
        "",
        "optimizer-sees-shape",
    ]


class Counting(optim.Optimizer):
    """Counts its calls in the groups, as pytorch_optimizer's do."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for one in group["params"]:
                one.sub_(group["lr"] / group["calls"] * one.grad)


@pytest.mark.slow
def test_at_stage_3_step_is_called_for_each_group() -> None:
    def of_halves(parameters: Any) -> optim.Optimizer:
        return Counting([{"params": parameters[:2]}, {"params": parameters[2:]}])

    assert [judge(Counting, stage=3), judge(of_halves, stage=2)] == ["", ""]
    with pytest.raises(
        ConfigError, match=r"once for each of its groups; set zero.stage: 2"
    ) as caught:
        check_optimizer(of_halves, stage=3, key="optimizer", value="mine")
    assert caught.value.problems[0].kind == "optimizer-sees-shape"


def notes_norms(optimizer: AllWeights, group: dict[str, Any]) -> None:
    """Looks at all numbers, and steps each by itself."""
    norms = torch.stack([one.grad.norm() for one in group["params"]])
    assert bool(torch.isfinite(norms).all())
    take(optimizer, group)


@pytest.mark.slow
def test_a_norm_that_changes_no_step_is_no_reason_to_refuse() -> None:
    assert judge(partial(AllWeights, step=notes_norms), stage=2) == ""


def test_state_that_no_checkpoint_gives_back_is_refused_at_every_stage() -> None:
    """torchao keeps 8 bits in tensors of a class that torch does not read onto a device."""
    optimizers = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with pytest.raises(ConfigError, match=r"its state of a weight holds exp_avg, .*OptimState8bit"):
        check_optimizer(
            handed_over_optimizer(optimizers.AdamW8bit), stage=0, key="optimizer", value="mine"
        )


def test_state_of_objects_is_refused() -> None:
    def keeps_an_object(optimizer: AllWeights, group: dict[str, Any]) -> None:
        for one in group["params"]:
            optimizer.state[one]["place"] = Own
        take(optimizer, group)

    assert judge(partial(AllWeights, step=keeps_an_object), stage=0) == "optimizer-group-object"


class WithModes(Own):
    """Evaluates other weights than it steps, as schedule-free optimizers do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_modes_are_refused_at_every_stage() -> None:
    assert {judge(partial(WithModes, step=lion), stage=stage) for stage in range(4)} == {
        "optimizer-needs-modes"
    }


@pytest.mark.slow
def test_ranks_of_a_tensor_group_have_a_part_of_the_weights() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.tensor: 2 each rank has a part.*set parallel.tensor: 1"
    ):
        check_optimizer(
            partial(AllWeights, step=clips_all), stage=0, key="optimizer", value="mine", tensor=2
        )
    check_optimizer(optim.AdamW, stage=0, key="optimizer", value="mine", tensor=2)
