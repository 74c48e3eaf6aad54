"""ResNets: ResNet-18 for small images (28 to 64 pixels), and torchvision's, untrained."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.functional import relu
from torchvision.models import resnet  # type: ignore[import-untyped]

from framework.models.initialized import HeConv2d
from framework.models.layers import LayerStack

STAGE_WIDTHS = (64, 128, 256, 512)
BLOCKS_PER_STAGE = 2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2015, "Deep Residual Learning", figure 5
    left).

    Input: (batch, in_channels, H, W). Output: (batch, out_channels, ceil(H / stride), ceil(W /
    stride)). Where the shape changes, the shortcut is a 1x1 convolution with batch norm (the
    paper's option B).
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = HeConv2d(
            in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False
        )
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = HeConv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                HeConv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = relu(self.norm1(self.conv1(images)))
        return relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class SmallResNet18(LayerStack):
    """ResNet-18 with a 3x3 stride-1 stem and no max pooling: 11,173,962 parameters for 3 channels
    and 10 classes.

    Input: (batch, in_channels, H, W), floating point, of any H and W. Output: logits (batch,
    num_classes).
    """

    def __init__(self, num_classes: int = 10, *, in_channels: int = 1) -> None:
        layers = OrderedDict[str, nn.Module](
            conv=HeConv2d(in_channels, STAGE_WIDTHS[0], kernel_size=3, padding=1, bias=False),
            norm=nn.BatchNorm2d(STAGE_WIDTHS[0]),
            relu=nn.ReLU(),
        )
        previous = STAGE_WIDTHS[0]
        for stage, width in enumerate(STAGE_WIDTHS):
            for block in range(BLOCKS_PER_STAGE):
                is_first_of_stage = stage > 0 and block == 0
                stride = 2 if is_first_of_stage else 1
                layers[f"block{stage + 1}_{block + 1}"] = BasicBlock(previous, width, stride=stride)
                previous = width
        layers.update(
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(previous, num_classes),
        )
        super().__init__(layers)


class LayeredResNet(resnet.ResNet):  # type: ignore[misc]
    """torchvision's ResNet with a list of its layers, so that it can be cut; the names of its
    weights are torchvision's.
    """

    def layers(self) -> list[tuple[str, nn.Module]]:
        """List stem, residual blocks and head in the order of `forward`."""
        layers: list[tuple[str, nn.Module]] = []
        for name in ("conv1", "bn1", "relu", "maxpool"):
            layers.append((name, getattr(self, name)))
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            for name, block in getattr(self, stage).named_children():
                layers.append((f"{stage}.{name}", block))
        layers.append(("avgpool", self.avgpool))
        layers.append(("flatten", nn.Flatten()))
        layers.append(("fc", self.fc))
        return layers


def resnet18(num_classes: int = 1000, *, in_channels: int = 3) -> nn.Module:
    """ResNet-18 (He et al. 2015) of torchvision: 11,689,512 parameters for 3 channels and 1000
    classes.

    Returns:
        A module from images (batch, in_channels, H, W), H and W of 32 pixels or more, to logits
        (batch, num_classes).
    """
    return _build(resnet.BasicBlock, (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels)


def resnet50(num_classes: int = 1000, *, in_channels: int = 3) -> nn.Module:
    """ResNet-50 (He et al. 2015, stride in the 3x3 convolution) of torchvision: 25,557,032
    parameters for 1000 classes.

    Result as for `resnet18`.
    """
    return _build(resnet.Bottleneck, (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels)


def _build(
    block: type[nn.Module], num_blocks: tuple[int, ...], *, num_classes: int, in_channels: int
) -> nn.Module:
    model = LayeredResNet(block, list(num_blocks), num_classes=num_classes)
    if in_channels != 3:
        model.conv1 = HeConv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model
