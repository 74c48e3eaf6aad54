"""Parameter groups that an optimizer gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework.config.base import Target
from framework.config.optimizer import AdamW, Group
from framework.engine.parameter_groups import parameter_groups
from framework.recipes.image_models.resnet import SmallResNet18

MATRICES = AdamW(weight_decay=0.1, weight_decay_on="matrices")


def test_decay_on_matrices_leaves_biases_and_norms_alone() -> None:
    model = SmallResNet18()
    model.conv.weight.requires_grad_(False)
    groups: Any = parameter_groups(dict(model.named_parameters()), MATRICES)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = ([names[id(parameter)] for parameter in group["params"]] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(
        "norm" not in name and name.endswith("weight") and ".shortcut.1." not in name
        for name in decayed
    )
    assert all("norm" in name or name.endswith("bias") or ".shortcut.1." in name for name in others)
    assert {*decayed, *others, "conv.weight"} == set(names.values())


def test_frozen_layers_count_in_the_decay_of_rates() -> None:
    """As in a pipeline, which counts the model's layers."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    model[1].weight.requires_grad_(False)
    section = AdamW(lr=1.0, layer_decay=0.5)
    groups: Any = parameter_groups(dict(model.named_parameters()), section)
    rates = {group["params"][0]: group.get("lr", 1.0) for group in groups}
    assert rates == {model[0].weight: 0.125, model[2].weight: 0.5, model[3].weight: 1.0}
    staged: Any = parameter_groups(
        {"0.weight": model[0].weight}, section, layers=["0", "1", "2", "3"]
    )
    assert staged[0]["lr"] == 0.125


def test_an_optimizer_decays_what_it_should() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    groups = parameter_groups(
        dict(model.named_parameters()), AdamW(weight_decay=0.5, weight_decay_on="matrices")
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight, before["0.weight"] * (1 - 0.1 * 0.5))
    assert all(
        torch.equal(value, before[name])
        for name, value in model.state_dict().items()
        if name != "0.weight"
    )


def test_partitioned_weights_have_the_dimensions_they_had() -> None:
    """ZeRO-3 leaves flat, empty tensors and their shapes as `ds_shape`."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    groups: Any = parameter_groups(dict(model.named_parameters()), MATRICES)
    assert [
        group["params"][0] is parameter
        for group, parameter in zip(groups, model.parameters(), strict=True)
    ] == [True] * 2


def test_where_all_are_treated_alike_there_are_no_groups() -> None:
    model = nn.Linear(3, 2)
    named = dict(model.named_parameters())
    for wanted in (
        AdamW(),
        AdamW(weight_decay=0.0, weight_decay_on="matrices"),
        Target(target="torch.optim:SGD"),
    ):
        assert parameter_groups(named, wanted) == list(model.parameters())
    assert len(parameter_groups({"weight": model.weight}, MATRICES)) == 1


def test_weights_of_a_group_have_its_rate_and_its_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    own = [Group(match="1.*", lr=0.02, weight_decay=0.0)]
    groups: Any = parameter_groups(
        dict(model.named_parameters()), AdamW(lr=0.1, weight_decay=0.5, groups=own)
    )
    assert [len(group["params"]) for group in groups] == [2, 2]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.5),
        (pytest.approx(0.02), 0.0),
    ]
