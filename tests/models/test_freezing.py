"""Weights that a config freezes in all steps."""

from __future__ import annotations

import pytest
from torch import nn

from framework.config.training import Training
from framework.errors import ConfigError
from framework.models.freezing import freeze
from framework.models.prepare_model import prepare_model
from tests.models.small_models import IDS, gpt


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_matches_as_a_whole_is_frozen() -> None:
    model = prepare_model(gpt(), Training(freeze=[r"embed\..*", r"blocks\.[01]\..*", "norm.bias"]))
    frozen = {name for name, _ in model.named_parameters()} - trained(model)
    assert {
        "embed.weight",
        "blocks.0.mlp.up.weight",
        "blocks.1.attention.key.bias",
        "norm.bias",
    } <= frozen
    assert all(
        name.startswith(("embed.", "blocks.0.", "blocks.1.")) or name == "norm.bias"
        for name in frozen
    )


def test_a_frozen_weight_gets_no_gradient_and_the_others_theirs() -> None:
    model = prepare_model(gpt(), Training(freeze=["positions.*"], recompute_every=2))
    model(IDS).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == {
        "positions.weight"
    }


@pytest.mark.parametrize(
    ("patterns", "kinds", "words"),
    [
        (
            ["norm"],
            ["freeze-matches-nothing"],
            "it must match the whole name, as in blocks.0.attention_norm.weight; write norm.*",
        ),
        (["embed.wieght"], ["freeze-matches-nothing"], "did you mean embed.weight?"),
        (["bloks.*"], ["freeze-matches-nothing"], "did you mean blocks.*?"),
        (["zzz"], ["freeze-matches-nothing"], "names begin with embed, positions, blocks, norm"),
        (["zzz", "norm.bias", "qqq"], ["freeze-matches-nothing"] * 2, "training.freeze.2 = qqq"),
        ([".*"], ["freeze-matches-all"], "nothing would be left to train"),
        ([".*weight", ".*bias"], ["freeze-matches-all"], "training.freeze = [.*weight, .*bias]"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(
    patterns: list[str], kinds: list[str], words: str
) -> None:
    model = gpt()
    before = trained(model)
    with pytest.raises(ConfigError) as caught:
        prepare_model(model, Training(freeze=patterns))
    assert [problem.kind for problem in caught.value.problems] == kinds
    assert words in str(caught.value)
    assert trained(model) == before


def test_what_the_user_froze_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    with pytest.raises(ConfigError, match="freeze-matches-all"):
        freeze(model, ["0.*"])
