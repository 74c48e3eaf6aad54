from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from framework.recipes.image_models.resnet import BasicBlock, SmallResNet18


@pytest.mark.parametrize(("in_channels", "expected"), [(3, 11_173_962), (1, 11_172_810)])
def test_has_the_published_number_of_parameters(in_channels: int, expected: int) -> None:
    model = SmallResNet18(10, in_channels=in_channels)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_keeps_the_resolution_in_the_first_stage_and_halves_it_in_the_others() -> None:
    model = SmallResNet18(10, in_channels=1).eval()
    shapes: list[torch.Size] = []
    for name, layer in model.named_children():
        if name.endswith("_2"):
            layer.register_forward_hook(
                lambda _layer, _inputs, output: shapes.append(output.shape[1:])
            )
    with torch.no_grad():
        assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    assert shapes == [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]


def test_convolutions_start_with_he_fan_out_weights() -> None:
    convolutions = [module for module in SmallResNet18().modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20
    for convolution in convolutions:
        fan_out = convolution.out_channels * math.prod(convolution.kernel_size)
        assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.15)


def test_a_block_with_zero_residual_passes_its_input_through() -> None:
    block = BasicBlock(4, 4).eval()
    nn.init.zeros_(block.norm2.weight)
    images = torch.rand(2, 4, 5, 5)
    assert torch.equal(block(images), images)
