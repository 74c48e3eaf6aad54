from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.errors import ConfigError
from framework.models.layer_lists import as_layers
from framework.models.layers import Layer, LayeredModel, recipes_only
from framework.recipes.image_models.resnet import SmallResNet18
from framework.recipes.image_models.small_nets import MLP, LeNet


class Embedding(nn.Embedding):
    def forward(self, value: Tensor, *, as_head: bool = False) -> Tensor:
        return value @ self.weight.T if as_head else super().forward(value)


def recipes() -> list[Layer]:
    build = partial(Embedding, 7, 5)
    return [
        Layer("embed", build, tied="embed"),
        Layer("trunk.first", partial(nn.Linear, 5, 5)),
        Layer("trunk.second", partial(nn.Linear, 5, 5)),
        Layer("head", build, call=lambda module, value: module(value, as_head=True), tied="embed"),
    ]


def test_weights_bear_the_names_of_layers_and_ties_are_one_module() -> None:
    model = LayeredModel(recipes())
    names = [
        "embed.weight",
        "trunk.first.weight",
        "trunk.first.bias",
        "trunk.second.weight",
        "trunk.second.bias",
    ]
    assert list(model.state_dict()) == names
    ids = torch.tensor([[1, 2]])
    hidden = model.trunk.second(model.trunk.first(model.embed(ids)))
    assert torch.equal(model(ids), hidden @ model.embed.weight.T)


def test_a_layer_built_alone_has_the_weights_it_has_in_the_model() -> None:
    torch.manual_seed(3)
    model = LayeredModel(recipes())
    torch.rand(10)
    with recipes_only():
        bare = LayeredModel(recipes())
    assert list(bare.parameters()) == []
    alone = bare.layers()[2].make(2, seed=3)
    assert torch.equal(alone.weight, model.trunk.second.weight)
    assert not torch.equal(model.trunk.first.weight, model.trunk.second.weight)


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    LayeredModel(recipes())
    assert torch.equal(torch.rand(2), expected)


def test_recompute_gives_the_same_gradients_and_keeps_less() -> None:
    torch.manual_seed(0)
    model = LayeredModel([Layer(f"l{n}", partial(_Wide, 32)) for n in range(8)])
    value = torch.randn(16, 32, requires_grad=True)

    def run() -> tuple[list[Tensor], int]:
        kept: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(value).square().mean()
        saved = sum(kept)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return list(gradients), saved

    plain, plain_kept = run()
    model.recompute_every = 2
    recomputed, recomputed_kept = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert recomputed_kept < 0.2 * plain_kept


class _Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(torch.nn.functional.gelu(self.up(value)))


def test_a_sequential_is_cut_between_all_its_layers() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    layers = as_layers(model)
    assert [layer.name for layer in layers] == ["0.0", "0.1", "1"]
    assert layers[0].build() is model[0][0]
    assert set(LayeredModel(layers).state_dict()) == set(model.state_dict())


@pytest.mark.parametrize(
    "model",
    [LeNet(), MLP(hidden_sizes=(20, 30)), SmallResNet18()],
    ids=lambda model: type(model).__name__,
)
def test_the_image_models_cut_into_layers_are_the_same(model: nn.Module) -> None:
    model.eval()
    cut = LayeredModel(as_layers(model)).eval()
    assert list(cut.state_dict()) == list(model.state_dict())
    assert len(cut.recipes) == len(list(model.children()))
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(cut(images), model(images))


def test_a_list_of_modules_is_a_model() -> None:
    assert [layer.name for layer in as_layers([nn.Linear(2, 2), nn.ReLU()])] == ["0", "1"]


class Told(nn.Module):
    def __init__(self, *, complete: bool = True) -> None:
        super().__init__()
        self.stem, self.head, self._complete = nn.Linear(2, 2), nn.Linear(2, 1), complete

    def layers(self) -> list[Any]:
        return [("stem", self.stem), ("relu", nn.ReLU())] + (
            [("head", self.head)] if self._complete else []
        )


def test_a_module_may_give_its_layers() -> None:
    assert [layer.name for layer in as_layers(Told())] == ["stem", "relu", "head"]


class Holds(nn.Module):
    """The common spelling: the attribute is a module, and no method that tells anything."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers


class FailsToTell(nn.Module):
    def layers(self) -> Any:
        return self.blocks


class FailsWithinLayers(nn.Module):
    def layers(self) -> Any:
        return [("stem", nn.Linear("3", 2))]  # type: ignore[arg-type]


class Doubles(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * super().forward(value)


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (nn.Linear(2, 2), "model-not-layered", "give it a method layers()"),
        (
            Holds(nn.ModuleList([nn.Linear(2, 2)])),
            "model-not-layered",
            "name the ModuleList otherwise (self.blocks)",
        ),
        (
            Holds(nn.Sequential(nn.Linear(2, 2))),
            "model-not-layered",
            "name the Sequential otherwise (self.blocks)",
        ),
        (FailsToTell(), "model-not-layered", "its layers() fails: AttributeError: 'FailsToTell'"),
        (FailsWithinLayers(), "model-not-layered", "its layers() fails: TypeError: "),
        (Doubles(nn.Linear(2, 2)), "model-not-layered", "a forward() of its own"),
        ([], "model-not-layered", "it is a sequence of no layers"),
        (Told(complete=False), "model-layers-incomplete", "head.weight"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_way_out(model: Any, kind: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_layers(model)
    (problem,) = caught.value.problems
    assert problem.kind == kind
    assert words in str(problem)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([Layer("a", nn.ReLU), Layer("a", nn.ReLU)], "two layers are named a"),
        (
            [Layer("a", nn.ReLU, tied="t"), Layer("b", nn.ReLU, tied="t", tied_weights=("bias",))],
            "different weights",
        ),
    ],
)
def test_bad_ties_are_refused(layers: list[Layer], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LayeredModel(layers)
