"""What a move does to parameter groups and schedules: a group is told by its weights, and the first
step has the right rate.

DeepSpeed's files of stage 0 with torch's optimizers, and DeepSpeed's own schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import STATE_KEY
from framework.checkpoint.state.weight_names import names_of
from framework.config.optimizer import Muon
from framework.engine.checkpoint_load import move_in
from framework.engine.parameter_groups import MuonWithAdamW, parameter_groups
from framework.plan.layout import Layout

Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "warmup": lambda optimizer: WarmupLR(optimizer, warmup_max_lr=0.2, warmup_num_steps=9),
    "warmup_decay": lambda optimizer: WarmupDecayLR(
        optimizer, 20, warmup_max_lr=0.2, warmup_num_steps=3
    ),
    "warmup_cosine": lambda optimizer: WarmupCosineLR(optimizer, 20, warmup_num_steps=3),
    "one_cycle": lambda optimizer: OneCycle(
        optimizer, 0.01, 0.2, cycle_first_step_size=4, cycle_momentum=False
    ),
    "lr_range_test": lambda optimizer: LRRangeTest(
        optimizer, lr_range_test_min_lr=0.01, lr_range_test_step_size=2
    ),
}


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def write(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, folder: Path
) -> SavedCheckpoint:
    """As DeepSpeed leaves it at stage 0."""
    (folder / "global_step5").mkdir()
    known = names_of(model)
    names = [
        [known[parameter] for parameter in group["params"]] for group in optimizer.param_groups
    ]
    content = {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        STATE_KEY: {"names": names, "state": {"step": 5}},
        "global_steps": 5,
        "global_samples": 8,
        "skipped_steps": 0,
    }
    torch.save(content, folder / "global_step5/mp_rank_00_model_states.pt")
    return SavedCheckpoint(folder, "global_step5", {"step": 5, "config": {"zero": {"stage": 0}}})


def move(
    checkpoint: SavedCheckpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
) -> None:
    engine: Any = SimpleNamespace(module=model, optimizer=optimizer, lr_scheduler=schedule)
    move_in(engine, checkpoint, names=names_of(model), layout=Layout(1, 1, 8, 8, 1))


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_first_step_after_a_move_has_the_rate_of_the_unbroken_run(
    kind: str, momentum: float, tmp_path: Path
) -> None:
    """SGD without momentum keeps no state, and no group in the checkpoint tells the rate."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    schedule = SCHEDULES[kind](optimizer)
    for _ in range(5):
        step(model, optimizer, schedule)
    checkpoint = write(model, optimizer, schedule, tmp_path)
    other = build()
    again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=momentum)
    following = SCHEDULES[kind](again)
    move(checkpoint, other, again, following)
    for _ in range(3):
        assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        step(model, optimizer, schedule)
        step(other, again, following)
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD])
def test_single_numbers_of_a_weight_are_moved(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """NAdam keeps the product of its momenta, ASGD its rate and its share of the average."""
    model = build()
    optimizer = make(model.parameters())
    schedule = SCHEDULES["warmup"](optimizer)
    for _ in range(5):
        step(model, optimizer, schedule)
    checkpoint = write(model, optimizer, schedule, tmp_path)
    other = build()
    again = make(other.parameters())
    following = SCHEDULES["warmup"](again)
    move(checkpoint, other, again, following)
    step(model, optimizer, schedule)
    step(other, again, following)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def groups(model: torch.nn.Module, *names: str) -> list[dict[str, Any]]:
    """As a pipeline stage has them: those that it has weights for."""
    own = {
        "matrices": [parameter for parameter in model.parameters() if parameter.ndim > 1],
        "others": [parameter for parameter in model.parameters() if parameter.ndim < 2],
    }
    return [
        {"params": own[name], "weight_decay": {"matrices": 0.5, "others": 0.0}[name]}
        for name in names
    ]


@pytest.mark.parametrize("names", [("others",), ("others", "matrices"), ("matrices",)])
def test_groups_are_matched_by_their_weights(names: tuple[str, ...], tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(groups(model, "matrices", "others"), lr=0.1)
    schedule = SCHEDULES["warmup"](optimizer)
    for _ in range(5):
        step(model, optimizer, schedule)
    optimizer.param_groups[1]["own"] = 3  # as an optimizer that counts in its groups
    checkpoint = write(model, optimizer, schedule, tmp_path)
    other = build()
    again = torch.optim.AdamW(groups(other, *names), lr=0.1)
    move(checkpoint, other, again, SCHEDULES["warmup"](again))
    for name, group in zip(names, again.param_groups, strict=True):
        assert group["weight_decay"] == {"matrices": 0.5, "others": 0.0}[name]
        assert group.get("own") == {"matrices": None, "others": 3}[name]
        assert group["lr"] == optimizer.param_groups[0]["lr"]


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    section = Muon(matrices=["0.weight"], adam_lr=0.01)
    return MuonWithAdamW(parameter_groups(dict(model.named_parameters()), section), section)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [muon, lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1)]
)
def test_state_that_differs_between_weights_moves_bit_for_bit(make: Any, tmp_path: Path) -> None:
    """Muon keeps one tensor of a matrix and AdamW two of a vector; Adafactor's are smaller than the
    weight.
    """
    model, other = build(), build()
    optimizer, again = make(model), make(other)
    schedule, following = SCHEDULES["warmup"](optimizer), SCHEDULES["warmup"](again)
    for _ in range(5):
        step(model, optimizer, schedule)
    move(write(model, optimizer, schedule, tmp_path), other, again, following)
    kept = {
        id(parameter): name
        for name, parameter in (*model.named_parameters(), *other.named_parameters())
    }
    states = [
        {
            kept[id(parameter)]: {key: value.tolist() for key, value in state.items()}
            for parameter, state in one
        }
        for one in (optimizer.state.items(), again.state.items())
    ]
    for state in states[1].values():
        assert state.pop("step") == 5
    assert states[1] == {
        name: {key: value for key, value in state.items() if key != "step"}
        for name, state in states[0].items()
    }
    for _ in range(3):
        step(model, optimizer, schedule)
        step(other, again, following)
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_what_a_function_gave_the_optimizer_and_the_checkpoint_overrides_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands in no config that could be compared."""
    model, other = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    schedule = SCHEDULES["warmup"](optimizer)
    step(model, optimizer, schedule)
    checkpoint = write(model, optimizer, schedule, tmp_path)
    same = torch.optim.SGD(other.parameters(), lr=0.3, momentum=0.9, weight_decay=0.5)
    move(checkpoint, other, same, SCHEDULES["warmup"](same))
    assert capsys.readouterr().err == "", "the schedule decides the rate"
    again = torch.optim.SGD(
        other.parameters(), lr=0.1, momentum=0.5, weight_decay=0.5, nesterov=True
    )
    move(checkpoint, other, again, SCHEDULES["warmup"](again))
    assert (
        "(momentum: 0.9 is kept, 0.5 was given; nesterov: false is kept, true was given)"
        in capsys.readouterr().err
    )
