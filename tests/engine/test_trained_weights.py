"""Weights whose flags or objects change in mid-run are refused by name, or trained as plain PyTorch
trains them.
"""

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
@pytest.mark.parametrize(("num_ranks", "stages"), [(1, [3]), (2, [0, 1, 2, 3])])
def test_every_stage_refuses_what_it_would_train_otherwise(
    num_ranks: int, stages: list[int], tmp_path: Path
) -> None:
    run_ranks(JOB, "out.json", *map(str, stages), num_ranks=num_ranks, cwd=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    right = {f"untouched {stage}" for stage in stages}
    if 0 in stages:  # where these were right, and stay accepted
        right |= {
            "frozen 0",
            *(f"toggled {stage} {order}" for stage in (0, 1, 2) for order in (True, False)),
        }
    assert {name: found[name] for name in right if not found[name] < 1e-6} == {}
    for name in found.keys() - right:
        text = found[name]
        assert text.startswith("after step"), f"{name}: {text}"
        if name.startswith(("added", "replaced")):
            weight = "third.weight (and 1 more)" if name.startswith("added") else "first.bias"
            assert text.startswith(
                f"after step 3: the model's weight {weight} is another object"
            ), text
            continue
        assert "requires_grad of first.weight (and 1 more) was changed after the start" in text
        assert text.endswith("[requires-grad-changed]")
        if name.startswith("thawed"):
            assert "it is True now" in text
            assert "until_step: 3}" in text
        else:
            assert "it is False now" in text


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
    return model, TrainedWeights(
        engine, {weight: name for name, weight in model.named_parameters()}
    )


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
