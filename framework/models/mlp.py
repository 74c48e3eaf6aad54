"""Multi-layer perceptron on flattened images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from framework.models.layer_stack import LayerStack


class MLP(LayerStack):
    """Linear, ReLU, dropout for every hidden layer, then a linear layer to the classes.

    Input: (batch, in_channels, image_size, image_size), floating point. Output: logits (batch, num_classes).
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        in_channels: int = 1,
        image_size: int = 28,
        hidden_sizes: Sequence[int] = (256, 256),
        dropout: float = 0.0,
    ) -> None:
        """Build the network.

        Args:
            num_classes: width of the last layer.
            in_channels: channels of an input image.
            image_size: height and width of an input image in pixels.
            hidden_sizes: width of each hidden layer; none gives a linear classifier.
            dropout: probability that a hidden unit is dropped while training.
        """
        widths = [in_channels * image_size**2, *hidden_sizes]
        layers = OrderedDict[str, nn.Module](flatten=nn.Flatten())
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            layers[f"fc{number}"] = nn.Linear(before, after)
            layers[f"relu{number}"] = nn.ReLU()
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        layers["classifier"] = nn.Linear(widths[-1], num_classes)
        super().__init__(layers)
