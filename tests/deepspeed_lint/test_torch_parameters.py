"""What torch's optimizers and schedules refuse, `check` refuses: every parameter of every class
with every odd value.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from deepspeed_lint.lint import lint
from deepspeed_lint.rules.optimizer import TORCH_OPTIMIZERS, TORCH_SCHEDULES
from deepspeed_lint.text.document import Document
from deepspeed_lint.topology import Topology
from deepspeed_lint.values import OPTIMIZERS, SCHEDULERS, mismatch

torch = pytest.importorskip("torch")

ODD: tuple[Any, ...] = (
    True,
    False,
    None,
    -1,
    0,
    1,
    2,
    10,
    -0.5,
    0.5,
    0.9999,
    1.5,
    "x",
    "0.9",
    "",
    {},
    [],
    [0.9],
    [0.9, 0.99],
    [0.9, 1.5],
    [-0.1, 0.9],
    [1, 0],
    [0.9, 0.99, 0.9],
    [2, 0.5],
    [0.5, 1.2],
    [3, 7],
    [None, 0.1],
    [None, None],
    ["x", "y"],
    "cos",
    "min",
    "rel",
    "cycle",
    "strong_wolfe",
    "triangular2",
)
# Only the code knows how many groups of parameters there are, and how long it trains.
OF_THE_MODEL = (
    "must have the same length as optimizer.param_groups",
    "expected 1 min_lrs",
    "Tried to step",
)
# What DeepSpeed makes of a type is not torch's class of that name.
CLASSES = sorted((TORCH_OPTIMIZERS - {"Muon"}) & set(dir(torch.optim)))
GIVEN: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
    "ExponentialLR": {"gamma": 0.5},
    "MultiStepLR": {"milestones": [3]},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
    "StepLR": {"step_size": 3},
}


def errors(optimizer: dict[str, Any], scheduler: dict[str, Any] | None = None) -> list[str]:
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": optimizer}
    config |= {"scheduler": scheduler} if scheduler is not None else {}
    found = lint(Document("", config), topology=Topology(device="cpu"))
    return [
        str(problem)
        for problem in found
        if problem.severity == "error" and problem.kind != "optimizer-cannot-step"
    ]


def parameters(cls: type) -> list[str]:
    """List the parameters, without parameters that DeepSpeed hands over or a file cannot hold."""
    return [
        name
        for name in inspect.signature(cls).parameters
        if name not in ("params", "optimizer", "scale_fn", "lr_lambda")
    ]


def optimizer_of(name: str, params: dict[str, Any]) -> Any:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(torch.optim, name)([weight], **params)
    weight.grad = torch.full((2, 2), 0.1)
    return optimizer


def torch_refuses(run: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return ""


def pairs(cls: type) -> Iterator[dict[str, Any]]:
    """Yield one parameter with each value, and each two flags together."""
    names = parameters(cls)
    yield from ({name: value} for name in names for value in ODD)
    flags = [
        name for name in names if inspect.signature(cls).parameters[name].default in (False, None)
    ]
    yield from ({one: True, other: True} for one, other in itertools.combinations(flags, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_what_an_optimizer_refuses_is_refused(name: str) -> None:
    cls = getattr(torch.optim, name)
    accepted = []
    for params in pairs(cls):
        if "amsgrad" in params and params["amsgrad"] is not False:
            continue  # DeepSpeed's own answer to it has a rule

        def run(params: dict[str, Any] = params) -> None:
            optimizer = optimizer_of(name, params)
            optimizer.step() if name != "LBFGS" else optimizer.step(lambda: torch.tensor(1.0))

        refusal = torch_refuses(run)
        if name == "SparseAdam" and "dense gradients" in refusal:
            refusal = ""
        ours = {
            "type": name,
            "params": params | ({"torch_adam": True} if name in ("Adam", "AdamW") else {}),
        }
        if refusal and not errors(ours):
            accepted.append(f"{params}: {refusal}")
    assert accepted == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_what_a_schedule_refuses_is_refused(name: str) -> None:
    cls = getattr(torch.optim.lr_scheduler, name)
    accepted = []
    changes = [GIVEN.get(name, {}) | change for change in pairs(cls)]
    changes += [
        {key: value for key, value in GIVEN.get(name, {}).items() if key != gone}
        for gone in GIVEN.get(name, {})
    ]
    for params in changes:

        def run(params: dict[str, Any] = params) -> None:
            optimizer = optimizer_of("AdamW", {"lr": 0.1})
            schedule = cls(optimizer, **params)
            for step in range(4):
                optimizer.step()
                schedule.step(*([float(step)] if name == "ReduceLROnPlateau" else []))

        refusal = torch_refuses(run)
        found = errors(
            {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.1}},
            {"type": name, "params": params},
        )
        if refusal and not found and not any(words in refusal for words in OF_THE_MODEL):
            accepted.append(f"{params}: {refusal}")
    assert accepted == []


def test_what_is_usual_is_taken() -> None:
    usual: dict[str, list[dict[str, Any]]] = {
        "SGD": [
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            {"lr": 0, "dampening": 0.5, "foreach": None, "fused": True},
        ],
        "RMSprop": [{"alpha": 0.9, "momentum": 0.5, "centered": True}],
        "Rprop": [{"etas": [0.5, 1.2], "step_sizes": [1e-6, 50]}],
        "Adafactor": [{"eps": [None, 0.001], "beta2_decay": -0.8, "d": 1.0}],
        "NAdam": [{"betas": [0.9, 0.99], "momentum_decay": 0}],
        "RAdam": [{"betas": [0, 0.999], "decoupled_weight_decay": True}],
        "Adadelta": [{"rho": 1}],
        "ASGD": [{"t0": 1e6}],
    }
    for name, many in usual.items():
        for params in many:
            assert (
                torch_refuses(lambda name=name, params=params: optimizer_of(name, params).step())
                == ""
            )
            assert errors({"type": name, "params": params}) == [], (name, params)
    for name, params in GIVEN.items():
        assert (
            errors({"type": "SGD", "params": {"lr": 0.1}}, {"type": name, "params": params}) == []
        ), name
    assert (
        errors(
            {"type": "SGD", "params": {}},
            {"type": "CyclicLR", "params": {"base_lr": [0.1], "max_lr": [1.0]}},
        )
        == []
    )


def test_the_tables_know_every_class_and_parameter() -> None:
    assert set(OPTIMIZERS) | {"Adam", "AdamW", "Adagrad"} == set(CLASSES)
    for name, known in OPTIMIZERS.items():
        assert set(known) == set(parameters(getattr(torch.optim, name))), name
    assert (
        set(SCHEDULERS) | {"ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR"}
        == TORCH_SCHEDULES
    )
    for name, known in SCHEDULERS.items():
        signature = inspect.signature(getattr(torch.optim.lr_scheduler, name))
        assert set(known) == set(parameters(getattr(torch.optim.lr_scheduler, name))), name
        needed = [
            key
            for key, value in signature.parameters.items()
            if value.default is inspect.Parameter.empty
        ]
        assert set(needed) - {"optimizer"} == {
            key for key in known if known[key].get("required")
        }, name


@pytest.mark.parametrize("schedule", ["CyclicLR", "OneCycleLR"])
def test_a_cycle_of_the_momentum_wants_one(schedule: str) -> None:
    for name in CLASSES:
        params = GIVEN[schedule]
        refusal = torch_refuses(
            lambda name=name, params=params: getattr(torch.optim.lr_scheduler, schedule)(
                optimizer_of(name, {}), **params
            )
        )
        found = errors({"type": name, "params": {}}, {"type": schedule, "params": params})
        assert bool(refusal) == bool(found), (name, refusal, found)


@pytest.mark.parametrize("name", ["AdamW", "adam", "Lion", "Lamb", "Muon"])
@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.5], [0.9, 0.9, 0.9], [-0.1, 0.9], [1, 0.9]])
def test_deepspeeds_own_optimizers_take_two_betas_below_1(name: str, betas: list[float]) -> None:
    assert any(
        "optimizer.params.betas" in line
        for line in errors({"type": name, "params": {"lr": 0.1, "betas": betas}})
    )


def test_whole_numbers_beyond_64_bits_are_refused() -> None:
    """torch converts them in the first step, and not all of its optimizers can."""
    assert "OverflowError" in torch_refuses(lambda: optimizer_of("SGD", {"lr": 10**30}).step())
    for name in ("SGD", "AdamW", "RMSprop"):
        assert errors({"type": name, "params": {"lr": 10**30}}) != []
        assert errors({"type": name, "params": {"lr": 2**62}}) == []


def test_numbers_that_are_none_are_no_numbers() -> None:
    assert mismatch(float("nan"), {"type": "number", "minimum": 0}) is not None
    assert mismatch(float("inf"), {"type": "number"}) is not None
