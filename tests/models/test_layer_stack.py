from __future__ import annotations

import torch
from torch import nn

from framework.recipes.image_models.small_nets import LeNet


def test_a_slice_shares_the_layers_and_computes_the_part() -> None:
    model = LeNet()
    images = torch.randn(2, 1, 28, 28)
    features = model[:-1]
    assert type(features) is nn.Sequential
    assert model[-1] is model.fc3
    assert torch.equal(model.fc3(features(images)), model(images))


def test_negative_and_stepped_slices_follow_lists() -> None:
    model = LeNet()
    layers = list(model.children())
    for part in (slice(-3, None), slice(2, 9, 3), slice(5, 2), slice(None, None, -1)):
        assert list(model[part].children()) == layers[part]
