"""`model`: what is trained. A new model is a class here (its registry line) and its module in `framework/models/`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Tag

from framework.config.base import Fraction, ModelKind, Object, PositiveCount, Target, kind_of
from framework.config.language_models import BERT, GPT


class Classifier(ModelKind):
    """Base of all image classifiers."""

    layers_in_list: ClassVar[int]

    num_classes: PositiveCount = 10
    """Number of classes, the width of the last layer."""
    in_channels: PositiveCount = 1
    """Channels of an input image: 1 for grey, 3 for colour."""

    def expected_image_size(self) -> int | None:
        """Height and width in pixels that the model insists on; None where any size works."""
        return None

    def num_layers_in_list(self) -> int:
        return self.layers_in_list


class LeNet(Classifier):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, as used on MNIST and Fashion-MNIST."""

    builds: ClassVar[str] = "framework.models.small_nets:LeNet"
    has_convolutions: ClassVar[bool] = True
    layers_in_list: ClassVar[int] = 12
    kind: Literal["lenet"] = "lenet"
    image_size: Literal[28, 32] = 28
    """Height and width of an input image in pixels; 28 is padded to 32 by the first convolution."""

    def expected_image_size(self) -> int | None:
        return self.image_size


class SmallResNet18(Classifier):
    """ResNet-18 (He et al. 2015) for small images: a 3x3 stem without pooling, as in the Fashion-MNIST literature."""

    builds: ClassVar[str] = "framework.models.resnet:SmallResNet18"
    has_batch_norm: ClassVar[bool] = True
    has_convolutions: ClassVar[bool] = True
    layers_in_list: ClassVar[int] = 14
    kind: Literal["small_resnet18"] = "small_resnet18"


class ResNet18(Classifier):
    """torchvision's ResNet-18 (7x7 stem), untrained."""

    builds: ClassVar[str] = "framework.models.resnet:resnet18"
    has_batch_norm: ClassVar[bool] = True
    has_convolutions: ClassVar[bool] = True
    layers_in_list: ClassVar[int] = 15
    kind: Literal["resnet18"] = "resnet18"
    num_classes: PositiveCount = 1000
    in_channels: PositiveCount = 3


class ResNet50(Classifier):
    """torchvision's ResNet-50 (7x7 stem), untrained."""

    builds: ClassVar[str] = "framework.models.resnet:resnet50"
    has_batch_norm: ClassVar[bool] = True
    has_convolutions: ClassVar[bool] = True
    layers_in_list: ClassVar[int] = 23
    kind: Literal["resnet50"] = "resnet50"
    num_classes: PositiveCount = 1000
    in_channels: PositiveCount = 3


class MLP(Classifier):
    """Multi-layer perceptron on flattened images: linear, ReLU, dropout, repeated."""

    builds: ClassVar[str] = "framework.models.small_nets:MLP"
    kind: Literal["mlp"] = "mlp"
    image_size: PositiveCount = 28
    """Height and width of an input image in pixels."""
    hidden_sizes: list[PositiveCount] = [256, 256]
    """Width of each hidden layer; an empty list gives a linear classifier."""
    dropout: Fraction = 0.0
    """Probability that a hidden unit is dropped while training."""

    def expected_image_size(self) -> int | None:
        return self.image_size

    def num_layers_in_list(self) -> int:
        """Flatten, three for each hidden layer, classifier."""
        return 3 * len(self.hidden_sizes) + 2


ModelSection = Annotated[
    Annotated[LeNet, Tag("lenet")]
    | Annotated[SmallResNet18, Tag("small_resnet18")]
    | Annotated[ResNet18, Tag("resnet18")]
    | Annotated[ResNet50, Tag("resnet50")]
    | Annotated[MLP, Tag("mlp")]
    | Annotated[GPT, Tag("gpt")]
    | Annotated[BERT, Tag("bert")]
    | Annotated[Target, Tag("target")]
    | Annotated[Object, Tag("object")],
    Discriminator(kind_of),
]
