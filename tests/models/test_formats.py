"""Images with their channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from framework.models.formats import channels_last
from framework.recipes.image_models.resnet import SmallResNet18


@pytest.mark.parametrize("channels", [1, 3])
def test_convolutions_follow_the_order_of_their_images(channels: int) -> None:
    torch.manual_seed(0)
    model, images = SmallResNet18(in_channels=channels), torch.randn(2, channels, 16, 16)
    expected = model(images)
    orders: list[bool] = []
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.register_forward_hook(
                lambda _, __, output: orders.append(
                    output.is_contiguous(memory_format=torch.channels_last)
                )
            )
    model(images)
    assert not any(orders[:5])
    orders.clear()
    reordered = channels_last(images)
    assert torch.equal(reordered, images)
    torch.testing.assert_close(model(reordered), expected)
    assert orders == [True] * 20
