"""Lists of functions, `LayerSpec`s and `TiedLayerSpec`s, and a `PipelineModule`, as layers."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.utils import set_random_seed
from torch import Tensor, nn

from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.models.layer_lists import as_layers
from framework.models.layer_specs import pipelines_unbuilt
from framework.models.layers import Layer, LayeredModel, recipes_only
from framework.setup.components import as_module, model_builder

WIDTH = 4


class Words(nn.Embedding):
    """An embedding whose matrix is the last layer's, too."""


def logits(words: nn.Module, value: Tensor) -> Tensor:
    """Return the products of vectors and all words."""
    return nn.functional.linear(value, words.weight)


def specs() -> list[Any]:
    """Return layers as a script for DeepSpeed writes them."""
    return [
        TiedLayerSpec("words", Words, 10, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        lambda value: value.relu(),
        torch.tanh,
        TiedLayerSpec("words", Words, 10, WIDTH, forward_fn=logits),
    ]


def test_specs_are_recipes() -> None:
    torch.manual_seed(3)
    model = as_module(specs())
    assert isinstance(model, LayeredModel)
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    tokens = torch.tensor([[1, 2], [3, 0]])
    words, linear = model.state_dict().values()
    expected = torch.tanh((words[tokens] @ linear.T).relu()) @ words.T
    assert torch.equal(model(tokens), expected)
    torch.manual_seed(3)
    with recipes_only():
        recipes = as_layers(as_module(specs()))
    assert not any(layer.is_built for layer in recipes if layer.name in "014")
    assert torch.equal(recipes[1].make(1, seed=3).weight, linear), "wherever it is built"


def test_a_spec_in_several_places_has_the_seed_of_each() -> None:
    spec = LayerSpec(nn.Linear, WIDTH, WIDTH)
    layers = [spec] * 3
    for _ in range(2):  # also where the script's function is called again
        model = model_builder(
            config_from_values({}), partial(PipelineModule, layers, num_stages=1, seed_layers=True)
        )()
        for number in range(3):
            set_random_seed(1234 + number)
            drawn = nn.Linear(WIDTH, WIDTH)
            assert torch.equal(model.state_dict()[f"{number}.weight"], drawn.weight)


@pytest.mark.parametrize("seeds", [{}, {"seed_layers": True, "base_seed": 7}])
def test_a_pipeline_module_is_its_list(seeds: dict[str, Any]) -> None:
    """Also of a subclass, whose constructor makes the list, and without a process group."""

    class Net(PipelineModule):  # type: ignore[misc]
        def __init__(self) -> None:
            topology = PipeDataParallelTopology(num_pp=2, num_dp=1)
            super().__init__(layers=specs(), topology=topology, **seeds)

    config = config_from_values({"parallel": {"pipe": 2}, "model": {"target": "a:b"}})
    constructor = PipelineModule.__init__
    before = (random.getstate(), np.random.get_state()[1].tolist())
    torch.manual_seed(3)
    model = model_builder(config, Net)()
    assert PipelineModule.__init__ is constructor
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    weights = list(model.state_dict().values())
    if not seeds:
        assert torch.equal(weights[1], as_layers(specs())[1].make(1, seed=3).weight)
        return
    for number, weight in enumerate(weights):
        set_random_seed(7 + number)
        assert torch.equal(weight, specs()[number].build().weight), "as DeepSpeed draws it"


def pipeline(**arguments: Any) -> PipelineModule:
    """Return a pipeline of two layers."""
    layers = [LayerSpec(nn.Linear, 2, 2), nn.ReLU()]
    return PipelineModule(layers=layers, **{"num_stages": 1, **arguments})


def test_what_the_run_config_decides_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_from_values({"model": {"target": "a:b"}})
    model_builder(config, partial(pipeline, num_stages=2, activation_checkpoint_interval=1))()
    (line,) = capsys.readouterr().err.splitlines()
    assert "not num_stages=2 (parallel.pipe is 1), activation_checkpoint_interval=1 " in line
    model_builder(config, pipeline)()
    assert not capsys.readouterr().err


def test_its_loss_is_not_dropped_in_silence() -> None:
    build = partial(pipeline, loss_fn=nn.MSELoss())
    with pytest.raises(ConfigError, match=r"loss_fn MSELoss.*\[pipeline-loss\]"):
        model_builder(config_from_values({"model": {"target": "a:b"}}), build)()
    with_task = {"model": {"target": "a:b"}, "task": {"target": "torch.nn:MSELoss"}}
    model_builder(config_from_values(with_task), build)()


def test_a_built_one_has_the_layers_of_one_stage_only() -> None:
    with pipelines_unbuilt():
        model = pipeline()
    del model.kept_arguments  # as one that was built
    config = config_from_values({"model": {"target": "a:b"}})
    with pytest.raises(ConfigError, match=r"built already.*its list of layers.*\[model-not-lay"):
        model_builder(config, model)()


HIDDEN = nn.Linear(2, 2)


def over_global(value: Any) -> Any:
    """Use a module of the file."""
    return HIDDEN(value)


def over_closure() -> Any:
    """Return a function that holds a module."""
    inner = nn.Linear(2, 2)
    return lambda value: inner(value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (3, "is neither a module nor a function"),
        (nn.ReLU, r"\(ReLU\) is a class; write ReLU\(\)"),
        (partial(nn.Linear, 2, 2), "makes a Linear instead of applying one"),
        (over_global, "uses the weights of a Linear, which no optimizer would find"),
        (over_closure(), "uses the weights of a Linear"),
        (HIDDEN.forward, "uses the weights of a Linear"),
        (partial(torch.add, other=HIDDEN), "uses the weights of a Linear"),
    ],
)
def test_what_is_no_layer_is_refused(item: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"item 1 of the list .*{words}.*\[model-not-layered\]"):
        as_layers([nn.ReLU(), item])


def test_ties_of_two_classes_are_refused() -> None:
    layers = [TiedLayerSpec("a", nn.Embedding, 3, 2), TiedLayerSpec("a", nn.Linear, 2, 3)]
    with pytest.raises(ConfigError, match=r"item 1.*make both a Embedding.*\[tied-layers-differ\]"):
        as_layers(layers)


def test_all_kinds_of_items_stand_in_one_list() -> None:
    layers = as_layers([Layer("a", nn.ReLU), LayerSpec(nn.ReLU), nn.Sequential(nn.ReLU()), abs])
    assert [layer.name for layer in layers] == ["a", "1", "2.0", "3"]
