from __future__ import annotations

import pytest
import torch

from framework.recipes.image_models.small_nets import LeNet


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("image_size", [28, 32])
def test_has_the_published_number_of_parameters(image_size: int) -> None:
    assert num_parameters(LeNet(10, in_channels=1, image_size=image_size)) == 61_706


@pytest.mark.parametrize(("in_channels", "image_size", "num_classes"), [(1, 28, 10), (3, 32, 7)])
def test_maps_images_to_logits(in_channels: int, image_size: int, num_classes: int) -> None:
    model = LeNet(num_classes, in_channels=in_channels, image_size=image_size)
    assert model(torch.zeros(2, in_channels, image_size, image_size)).shape == (2, num_classes)


def test_28_pixels_are_the_32_pixel_network_on_a_padded_image() -> None:
    small, large = LeNet(image_size=28), LeNet(image_size=32)
    large.load_state_dict(small.state_dict())
    images = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(small(images), large(torch.nn.functional.pad(images, [2, 2, 2, 2])))


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="28 or 32 pixels, not 64"):
        LeNet(image_size=64)


def test_children_in_order_are_the_whole_model() -> None:
    model = LeNet()
    images = torch.randn(2, 1, 28, 28)
    hidden = images
    for layer in model.children():
        hidden = layer(hidden)
    assert torch.equal(hidden, model(images))
