"""Small networks for images: LeNet-5 as later literature trains it, and the multi-layer
perceptron.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from framework.models.layers import LayerStack


class LeNet(LayerStack):
    """LeNet-5 (LeCun, Bottou, Bengio, Haffner 1998) with ReLU and max pooling for tanh and trained
    sub-sampling.

    The second convolution is fully connected to the first, and the last layer is linear: 61,706
    parameters for one input channel and ten classes.

    Input: (batch, in_channels, image_size, image_size), floating point. Output: logits (batch,
    num_classes).
    """

    def __init__(
        self, num_classes: int = 10, *, in_channels: int = 1, image_size: int = 28
    ) -> None:
        """Build the network for images of 32 pixels, as in the paper, or of 28, which the first
        convolution pads to 32.

        Raises:
            ValueError: `image_size` is neither 28 nor 32.
        """
        if image_size not in (28, 32):
            raise ValueError(f"LeNet takes images of 28 or 32 pixels, not {image_size}")
        super().__init__(
            OrderedDict[str, nn.Module](
                conv1=nn.Conv2d(in_channels, 6, kernel_size=5, padding=(32 - image_size) // 2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, kernel_size=5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * 5 * 5, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, num_classes),
            )
        )


class MLP(LayerStack):
    """Linear, ReLU, dropout for every hidden layer, then a linear layer to the classes.

    Input: (batch, in_channels, image_size, image_size), floating point. Output: logits (batch,
    num_classes).
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

        Empty `hidden_sizes` give a linear classifier; `dropout` is the probability of a hidden
        unit.
        """
        widths = [in_channels * image_size**2, *hidden_sizes]
        layers = OrderedDict[str, nn.Module](flatten=nn.Flatten())
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            layers[f"fc{number}"] = nn.Linear(before, after)
            layers[f"relu{number}"] = nn.ReLU()
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        layers["classifier"] = nn.Linear(widths[-1], num_classes)
        super().__init__(layers)
