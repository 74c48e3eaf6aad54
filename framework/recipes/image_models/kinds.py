"""Sections of image classifiers: LeNet, perceptrons, ResNets."""

from __future__ import annotations

from typing import ClassVar, Literal

from framework.config.base import Fraction, PositiveCount
from framework.config.model import Classifier


class LeNet(Classifier):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, as used on MNIST and Fashion-MNIST."""

    builds: ClassVar[str] = "framework.recipes.image_models.small_nets:LeNet"
    work: ClassVar[str] = "framework.recipes.image_models.work:layers_of"
    kind: Literal["lenet"] = "lenet"
    image_size: Literal[28, 32] = 28
    """Height and width of an input image in pixels; 28 is padded to 32 by the first convolution."""


class SmallResNet18(Classifier):
    """ResNet-18 (He et al. 2015) for small images: a 3x3 stem without pooling, as in the
    Fashion-MNIST literature.
    """

    builds: ClassVar[str] = "framework.recipes.image_models.resnet:SmallResNet18"
    work: ClassVar[str] = "framework.recipes.image_models.work:layers_of"
    has_batch_norm: ClassVar[bool] = True
    kind: Literal["small_resnet18"] = "small_resnet18"


class _TorchvisionResNet(Classifier):
    """Base of torchvision's ResNets; the defaults are those for ImageNet."""

    has_batch_norm: ClassVar[bool] = True
    num_classes: PositiveCount = 1000
    in_channels: PositiveCount = 3


class ResNet18(_TorchvisionResNet):
    """torchvision's ResNet-18 (7x7 stem), untrained."""

    builds: ClassVar[str] = "framework.recipes.image_models.resnet:resnet18"
    work: ClassVar[str] = "framework.recipes.image_models.work:layers_of"
    kind: Literal["resnet18"] = "resnet18"


class ResNet50(_TorchvisionResNet):
    """torchvision's ResNet-50 (7x7 stem), untrained."""

    builds: ClassVar[str] = "framework.recipes.image_models.resnet:resnet50"
    work: ClassVar[str] = "framework.recipes.image_models.work:layers_of"
    kind: Literal["resnet50"] = "resnet50"


class MLP(Classifier):
    """Multi-layer perceptron on flattened images: linear, ReLU, dropout, repeated."""

    builds: ClassVar[str] = "framework.recipes.image_models.small_nets:MLP"
    work: ClassVar[str] = "framework.recipes.image_models.work:layers_of"
    has_convolutions: ClassVar[bool] = False
    kind: Literal["mlp"] = "mlp"
    image_size: PositiveCount = 28
    """Height and width of an input image in pixels."""
    hidden_sizes: list[PositiveCount] = [256, 256]
    """Width of each hidden layer; an empty list gives a linear classifier."""
    dropout: Fraction = 0.0
    """Probability that a hidden unit is dropped while training."""
