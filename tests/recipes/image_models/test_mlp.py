from __future__ import annotations

import torch
from torch import nn

from framework.recipes.image_models.small_nets import MLP


def test_has_one_linear_layer_per_hidden_size_and_one_for_the_classes() -> None:
    model = MLP(10, in_channels=1, image_size=28, hidden_sizes=[256, 128])
    widths = [
        (layer.in_features, layer.out_features) for layer in model if isinstance(layer, nn.Linear)
    ]
    assert widths == [(784, 256), (256, 128), (128, 10)]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_without_hidden_layers_it_is_linear() -> None:
    model = MLP(5, in_channels=3, image_size=4, hidden_sizes=[])
    first, second = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    zero = model(torch.zeros(2, 3, 4, 4))
    torch.testing.assert_close(
        model(first + second) - zero, (model(first) - zero) + (model(second) - zero)
    )


def test_dropout_drops_the_asked_share_in_training_only() -> None:
    model = MLP(2, image_size=2, hidden_sizes=[10_000], dropout=0.3)
    nn.init.ones_(model.fc1.bias)
    hidden = model[:4](torch.zeros(1, 1, 2, 2))
    assert 0.27 < (hidden == 0).float().mean() < 0.33
    assert (model.eval()[:4](torch.zeros(1, 1, 2, 2)) != 0).all()


def test_weights_load_into_the_same_network_with_another_dropout() -> None:
    MLP(dropout=0.5).load_state_dict(MLP(dropout=0.0).state_dict())
