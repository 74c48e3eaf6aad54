"""Parameter groups by name, against groups written out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from framework.config.groups import (
    GroupValues,
    group_values,
    in_order,
    layer_depths,
    refuse_unmatched_groups,
    unmatched_modules,
)
from framework.config.load import config_from_values
from framework.config.optimizer import has_groups
from framework.config.training import LoRA
from framework.errors import ConfigError

SHAPES = {
    "embed.weight": (50, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.mlp.weight": (8, 8),
    "blocks.0.mlp.bias": (8,),
    "blocks.1.mlp.weight": (8, 8),
    "norm.weight": (8,),
    "head.weight": (50, 8),
}


def section(**keys: Any) -> Any:
    return config_from_values(
        {"optimizer": {"kind": "adamw", "lr": 0.1, "weight_decay": 0.5, **keys}}
    ).optimizer


@pytest.mark.parametrize(
    ("names", "depths"),
    [
        (SHAPES, [0, 1, 1, 1, 2, 3, 3]),
        (
            [
                "conv.weight",
                "layer1.0.conv.weight",
                "layer1.1.conv.weight",
                "layer2.0.x",
                "fc.bias",
            ],
            [0, 1, 2, 3, 4],
        ),
        (
            [
                "class_token",
                "encoder.layers.encoder_layer_0.ln_1.bias",
                "encoder.layers.encoder_layer_1.a",
                "heads.head.w",
            ],
            [0, 1, 2, 3],
        ),
        (["0.weight", "0.bias", "2.weight"], [0, 0, 1]),
        (["enc.0.w", "enc.1.w", "enc_norm.w", "dec.0.w", "dec.1.w", "out.w"], [0, 1, 2, 3, 4, 5]),
        (["weight"], [0]),
    ],
)
def test_layers_are_numbered_from_the_input(names: Any, depths: list[int]) -> None:
    assert list(layer_depths(names).values()) == depths


def test_a_weight_that_no_layer_holds_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"norm\.weight"):
        group_values({"norm.weight": (4,)}, section(layer_decay=0.5), layers=["blocks.0", "head"])


def test_a_model_without_modules_matches_no_name() -> None:
    lora = LoRA(target_modules=["query"], modules_to_save=["head"])
    assert [problem.fix for problem in unmatched_modules(lora, [])] == ["remove it", "remove it"]


def test_each_layer_has_a_share_of_the_next_ones_rate() -> None:
    found = group_values(SHAPES, section(layer_decay=0.5))
    assert [each.lr_ratio for each in found.values()] == [0.125, 0.25, 0.25, 0.25, 0.5, 1.0, 1.0]
    assert {each.weight_decay for each in found.values()} == {0.5}


def test_a_stage_has_the_rates_of_the_whole_model() -> None:
    layers = ["embed", "blocks.0", "blocks.1", "norm", "head"]
    whole = group_values(SHAPES, section(layer_decay=0.9))
    for stage in (list(SHAPES)[:4], list(SHAPES)[4:]):
        part = group_values(
            {name: SHAPES[name] for name in stage}, section(layer_decay=0.9), layers=layers
        )
        assert part == {name: whole[name] for name in stage}


def test_the_first_group_that_matches_has_the_weight_and_what_it_leaves_out_is_the_optimizers() -> (
    None
):
    groups = [
        {"match": "embed.*", "lr": 0.01},
        {"match": ".*norm.*", "weight_decay": 0.25},
        {"match": ".*(weight|bias)", "lr": 0.2, "weight_decay": 0.0},
    ]
    found = group_values(SHAPES, section(groups=groups, weight_decay_on="matrices"))
    assert {name: tuple(each[:2]) for name, each in found.items()} == {
        "embed.weight": (pytest.approx(0.1), 0.5),
        "blocks.0.norm.weight": (1.0, 0.25),
        "blocks.0.mlp.weight": (2.0, 0.0),
        "blocks.0.mlp.bias": (2.0, 0.0),
        "blocks.1.mlp.weight": (2.0, 0.0),
        "norm.weight": (1.0, 0.25),
        "head.weight": (2.0, 0.0),
    }
    assert in_order(found.values())[0].lr_ratio == 1.0, (
        "the rate that is logged is the first group's"
    )


def test_decay_on_matrices_is_two_groups_the_one_with_decay_first() -> None:
    """As checkpoints of earlier versions have them."""
    found = group_values(SHAPES, section(weight_decay_on="matrices"))
    assert [tuple(each[:2]) for each in in_order(found.values())] == [(1.0, 0.5), (1.0, 0.0)]


@pytest.mark.parametrize(
    ("keys", "some"),
    [
        ({}, False),
        ({"weight_decay_on": "matrices"}, True),
        ({"weight_decay_on": "matrices", "weight_decay": 0.0}, False),
        ({"layer_decay": 0.9}, True),
        ({"groups": [{"match": ".*", "lr": 0.3}]}, True),
    ],
)
def test_it_is_known_whether_all_are_stepped_alike(keys: dict[str, Any], some: bool) -> None:
    assert has_groups(section(**keys)) is some
    assert len(in_order(group_values(SHAPES, section(**keys)).values())) >= 1 + some or keys.get(
        "groups"
    )


def test_ones_own_optimizer_has_no_groups() -> None:
    assert not has_groups(SimpleNamespace(target="a:b"))


def test_a_group_without_weights_is_refused_by_name() -> None:
    groups = [
        {"match": "head.*", "lr": 1.0},
        {"match": "norm", "lr": 1.0},
        {"match": "haed.*", "lr": 1.0},
    ]
    with pytest.raises(ConfigError) as refused:
        refuse_unmatched_groups(SHAPES, section(groups=groups))
    assert [(each.kind, each.key) for each in refused.value.problems] == [
        ("group-matches-nothing", "optimizer.groups.1.match"),
        ("group-matches-nothing", "optimizer.groups.2.match"),
    ]
    assert "write norm.* or .*norm.*" in str(refused.value)


IN_BLOCKS = {
    "blocks.0.mlp.up.weight": (8, 8),
    "blocks.0.mlp.up.bias": (8,),
    "h_1.conv.weight": (8, 8, 3, 3),
    "layers.0.weight": (8, 8),
    "embed.weight": (50, 8),
}


def test_muon_has_the_matrices_inside_blocks_and_adam_the_rest() -> None:
    groups = [{"match": "embed.*", "lr": 0.5}]
    experts = {
        "layers.1.experts.up": (2, 8, 8),
        "layers.1.experts.up_bias": (2, 8),
        "layers.1.experts.0.conv.weight": (8, 8, 3),
    }
    found = group_values(
        IN_BLOCKS | experts,
        section(kind="muon", lr=0.1, adam_lr=0.01, weight_decay_on="matrices", groups=groups),
    )
    assert list(found.values()) == [
        GroupValues(1.0, 0.5, by_muon=True),
        GroupValues(pytest.approx(0.1), 0.0),
        GroupValues(pytest.approx(0.1), 0.5),
        GroupValues(pytest.approx(0.1), 0.5),
        GroupValues(pytest.approx(5.0), 0.5),
        GroupValues(1.0, 0.5, by_muon=True),
        GroupValues(pytest.approx(0.1), 0.5),
        GroupValues(pytest.approx(0.1), 0.5),
    ]
    assert in_order(found.values())[0].by_muon


def test_patterns_state_what_muon_has() -> None:
    found = group_values(IN_BLOCKS, section(kind="muon", matrices=[r"layers\..*", "embed.weight"]))
    assert [name for name, each in found.items() if each.by_muon] == [
        "layers.0.weight",
        "embed.weight",
    ]


@pytest.mark.parametrize(
    ("shapes", "matrices", "stated"),
    [
        (
            IN_BLOCKS,
            ["blocks.*"],
            r"optimizer.matrices.0 = blocks.\*: blocks.0.mlp.up.bias has the shape \(8,\).*muon-ne",
        ),
        (
            IN_BLOCKS,
            ["nowhere"],
            r"optimizer.matrices.0 = nowhere: no trained parameter.*group-matches-nothing",
        ),
        (
            {"layers.0.weight": (8, 8)},
            [],
            r"optimizer.matrices = \[\]: no trained matrix .*muon-needs-matrices",
        ),
    ],
)
def test_what_muon_cannot_step_is_refused(shapes: Any, matrices: list[str], stated: str) -> None:
    with pytest.raises(ConfigError, match=stated):
        refuse_unmatched_groups(shapes, section(kind="muon", matrices=matrices))
