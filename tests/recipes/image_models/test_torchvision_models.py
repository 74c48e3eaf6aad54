from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

from framework.models.layer_lists import as_layers
from framework.models.layers import LayeredModel
from framework.recipes.image_models.resnet import resnet18, resnet50


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        assert num_parameters(resnet18(1000, in_channels=3)) == 11_689_512
        assert num_parameters(resnet50(1000, in_channels=3)) == 25_557_032


@pytest.mark.parametrize(("build", "num_blocks"), [(resnet18, 8), (resnet50, 16)])
def test_cut_between_its_residual_blocks_it_is_the_same_network(
    build: Callable[..., nn.Module], num_blocks: int
) -> None:
    torch.manual_seed(0)
    model = build(7, in_channels=3).eval()
    cut = LayeredModel(as_layers(model)).eval()
    assert len(cut.recipes) == num_blocks + 7
    assert list(cut.state_dict()) == list(model.state_dict())
    images = torch.randn(2, 3, 40, 40)
    assert torch.equal(cut(images), model(images))


def test_another_number_of_channels_changes_the_stem_only() -> None:
    with torch.device("meta"):
        colour, grey = resnet18(10, in_channels=3), resnet18(10, in_channels=1)
    changed = {
        name
        for name, value in grey.state_dict().items()
        if value.shape != colour.state_dict()[name].shape
    }
    assert changed == {"conv1.weight"}
    assert num_parameters(colour) - num_parameters(grey) == 2 * 64 * 7 * 7


def test_maps_grey_images_to_logits() -> None:
    model = resnet18(7, in_channels=1).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 7)


def test_the_replaced_stem_keeps_torchvision_s_initialisation() -> None:
    weight = resnet18(10, in_channels=1).conv1.weight
    assert abs(weight.std().item() - (2 / (64 * 49)) ** 0.5) < 0.002


def test_for_colour_it_is_torchvision_s_network_to_the_bit() -> None:
    torch.manual_seed(0)
    ours = resnet18(10, in_channels=3).state_dict()
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(weights=None, num_classes=10).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
