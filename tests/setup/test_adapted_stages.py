"""Adapters of a stage are those of the whole model."""

from __future__ import annotations

import pytest
import torch

from framework.config.training import LoRA
from framework.errors import ConfigError
from framework.models.adapters import add_adapters
from framework.models.layer_lists import as_layers
from framework.models.layers import recipes_only
from framework.recipes.language_models.gpt import GPT
from framework.setup.adapted_stages import adapted_layers, trained_shapes_of_layers

pytest.importorskip("peft", reason="peft comes with the lora extra")
LORA = LoRA(target_modules=["query", "up"], r=4, lora_alpha=8, modules_to_save=["norm"])
SHAPE = {"vocab_size": 20, "max_positions": 8, "hidden_size": 8, "num_layers": 3, "num_heads": 2}
SHAPE |= {"num_kv_heads": 2, "mlp_size": 16}


def test_a_stage_has_the_adapters_and_weights_of_one_process() -> None:
    torch.manual_seed(3)
    whole = add_adapters(GPT.of(**SHAPE), LORA, seed=3).state_dict()
    torch.manual_seed(3)
    with recipes_only():
        layers = as_layers(GPT.of(**SHAPE))
    put: list[str] = []
    adapted, _ = adapted_layers(
        layers, LORA, seed=3, start=4, stop=7, put=lambda module, name: put.append(name)
    )
    assert put == ["embed", "blocks.2", "norm"], "the head is the embedding"
    assert [layer.is_built for layer in adapted] == [True, *[False] * 3, *[True] * 3]
    for layer in adapted[4:]:
        place = "embed" if layer.name == "head" else layer.name
        for name, tensor in layer.build().state_dict().items():
            assert torch.equal(tensor, whole[f"{place}.{name}"]), name


def test_what_is_trained_of_each_layer_is_known_without_numbers() -> None:
    with recipes_only():
        layers = as_layers(GPT.of(**SHAPE))
    shapes = trained_shapes_of_layers(layers, LORA, seed=0)
    assert {name: len(found) for name, found in shapes.items()} == {
        "embed": 0,
        "positions": 0,
        **{f"blocks.{number}": 8 for number in range(3)},
        "norm": 2,
        "head": 0,
    }
    assert shapes["blocks.1"]["attention.query.lora_A.default.weight"] == (4, 8)


def test_adapters_of_tied_layers_are_refused() -> None:
    with recipes_only():
        layers = as_layers(GPT.of(**SHAPE))
    tied = LORA.model_copy(update={"target_modules": ["embed"]})
    with pytest.raises(ConfigError) as caught:
        trained_shapes_of_layers(layers, tied, seed=0)
    assert caught.value.problems[0].kind == "lora-tied"
