"""Weights whose flags or objects change in mid-run are refused by name, or trained as plain PyTorch trains them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.engine.trained_weights import TrainedWeights
from framework.errors import TrainingError
from tests.launched import run_ranks
from tests.places import ROOT

JOB = ROOT / "tests/jobs/changed_weights.py"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_stage_refuses_what_it_would_train_otherwise(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(JOB, "out.json", num_ranks=num_ranks, cwd=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    for stage in range(4):
        for kind in ("thawed", "thawed in forward"):
            text = found.pop(f"{kind} {stage}")
            assert text.startswith("after step 3: requires_grad of first.weight (and 1 more) was changed"), text
            assert "it is True now" in text
            assert "until_step: 3}" in text
            assert text.endswith("[requires-grad-changed]")
        added = found.pop(f"added {stage}")
        assert added.startswith("after step 3: the model's weight third.weight (and 1 more)"), added
        if stage < 3:
            assert found.pop(f"replaced {stage}").startswith("after step 3: the model's weight first.bias is another")
        assert found.pop(f"untouched {stage}") < 1e-6
    frozen = [found.pop(f"frozen {stage}") for stage in (1, 2, 3)] + [found.pop("frozen half")]
    frozen += [found.pop(f"toggled 3 {order}") for order in (True, False)]
    assert all(text.endswith("[requires-grad-changed]") and "it is False now" in text for text in frozen), frozen
    # What is left was right, and stays accepted.
    assert found.pop("frozen 0") < 1e-6
    assert len(found) == 6
    assert {name: value for name, value in found.items() if not value < 1e-6} == {}


def watched(stage: int = 2) -> tuple[nn.Module, TrainedWeights]:
    """Two layers of which the second is frozen, and their watch."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    engine: Any = SimpleNamespace(
        module=model,
        optimizer=None,
        zero_optimization_stage=lambda: stage,
        global_steps=4,
        _take_model_step=lambda: None,
    )
    return model, TrainedWeights(engine, {weight: name for name, weight in model.named_parameters()})


def unregistered(model: nn.Module) -> None:
    del model[0].bias


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model[0].register_parameter("bias", nn.Parameter(torch.zeros(2))), "0.bias"),
        (lambda model: model.add_module("2", nn.Linear(2, 2)), "2.weight (and 1 more)"),
        (lambda model: setattr(model[1], "further", nn.Parameter(torch.zeros(2))), "1.further"),
        (lambda model: model.__delitem__(0), "0.weight (and 1 more)"),
        (unregistered, "0.bias"),
    ],
)
def test_other_objects_are_refused_by_name(change: Callable[[nn.Module], Any], named: str) -> None:
    model, weights = watched()
    weights.refuse_changes()
    change(model)
    with pytest.raises(TrainingError, match=r"\[weight-replaced\]") as refusal:
        weights.refuse_changes()
    assert f"after step 4: the model's weight {named} is another object" in str(refusal.value)


def test_what_is_not_trained_may_be_another_object() -> None:
    model, weights = watched()
    model[1] = nn.Linear(2, 2).requires_grad_(False)
    model.cached = nn.Identity()
    weights.refuse_changes()
    model[0].bias.data = torch.ones(2)
    weights.refuse_changes()
