"""torchvision's ResNets, untrained, for any number of input channels."""

from __future__ import annotations

from torch import nn
from torchvision.models import resnet  # type: ignore[import-untyped]

from framework.models.he_conv import HeConv2d

_RGB = 3


class LayeredResNet(resnet.ResNet):  # type: ignore[misc]
    """torchvision's ResNet, which says where it can be cut; the names of its weights are torchvision's."""

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Stem, residual blocks and head in the order of `forward`."""
        stages = ("layer1", "layer2", "layer3", "layer4")
        blocks = [
            (f"{stage}.{name}", block) for stage in stages for name, block in getattr(self, stage).named_children()
        ]
        stem = [(name, getattr(self, name)) for name in ("conv1", "bn1", "relu", "maxpool")]
        return [*stem, *blocks, ("avgpool", self.avgpool), ("flatten", nn.Flatten()), ("fc", self.fc)]


def resnet18(num_classes: int = 1000, *, in_channels: int = 3) -> nn.Module:
    """ResNet-18 (He et al. 2015) of torchvision: 11,689,512 parameters for 3 channels and 1000 classes.

    Args:
        num_classes: width of the last layer.
        in_channels: channels of an input image.

    Returns:
        A module from images (batch, in_channels, H, W), H and W of 32 pixels or more, to logits (batch, num_classes).
    """
    return _build(resnet.BasicBlock, (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels)


def resnet50(num_classes: int = 1000, *, in_channels: int = 3) -> nn.Module:
    """ResNet-50 (He et al. 2015, stride in the 3x3 convolution) of torchvision: 25,557,032 parameters for 1000 classes.

    Args and result as for `resnet18`.
    """
    return _build(resnet.Bottleneck, (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels)


def _build(block: type[nn.Module], num_blocks: tuple[int, ...], *, num_classes: int, in_channels: int) -> nn.Module:
    """Build torchvision's network with the right stem, drawn from torchvision's distribution."""
    model = LayeredResNet(block, list(num_blocks), num_classes=num_classes)
    if in_channels != _RGB:
        model.conv1 = HeConv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model
