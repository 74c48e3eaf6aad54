"""Sections of images with classes."""

from __future__ import annotations

from typing import ClassVar, Literal

from framework.config.base import PositiveCount
from framework.config.data import DataKind, ImageShape
from framework.config.paths import PathText


class _Images(DataKind):
    """Base of images with classes."""

    def form(self) -> str:
        return "images"


class Digits(_Images):
    """scikit-learn's bundled handwritten digits: 1,797 real grey images of 8x8 pixels, no
    download.
    """

    builds: ClassVar[str] = "framework.recipes.image_sets.digits:build"
    kind: Literal["digits"] = "digits"
    image_size: Literal[8, 28, 32] = 28
    """Height and width in pixels that the 8x8 originals are enlarged to."""

    def num_train_samples(self) -> int:
        return 1437

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=1, size=self.image_size, num_classes=10)


class FashionMNIST(_Images):
    """Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of 28x28 pixels, through
    torchvision.
    """

    builds: ClassVar[str] = "framework.recipes.image_sets.torchvision_sets:fashion_mnist"
    kind: Literal["fashion_mnist"] = "fashion_mnist"
    root: PathText = "data"
    """Folder that holds (or will hold) torchvision's ``FashionMNIST/raw``."""
    download: bool = False
    """Fetch the files when they are not there."""
    augment: bool = False
    """Random crops (padding 4) and horizontal flips while training."""

    def num_train_samples(self) -> int:
        return 60_000

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=1, size=28, num_classes=10)


class CIFAR10(_Images):
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 pixels, through
    torchvision.
    """

    builds: ClassVar[str] = "framework.recipes.image_sets.torchvision_sets:cifar10"
    kind: Literal["cifar10"] = "cifar10"
    root: PathText = "data"
    """Folder that holds (or will hold) torchvision's ``cifar-10-batches-py``."""
    download: bool = False
    """Fetch the files when they are not there."""
    augment: bool = True
    """Random crops (padding 4) and horizontal flips while training."""

    def num_train_samples(self) -> int:
        return 50_000

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=3, size=32, num_classes=10)


class ImageFolder(_Images):
    """Images in folders named after their class: ``<root>/train/<class>/*`` and
    ``<root>/val/<class>/*``.
    """

    builds: ClassVar[str] = "framework.recipes.image_sets.image_folder:build"
    looks_at_files: ClassVar[str] = "framework.recipes.image_sets.files:look_at_folders"
    kind: Literal["image_folder"] = "image_folder"
    root: PathText
    """Folder with the sub-folders named by `train_dir` and `eval_dir`."""
    train_dir: str = "train"
    """Sub-folder of the training images."""
    eval_dir: str = "val"
    """Sub-folder of the evaluation images."""
    image_size: PositiveCount = 224
    """Height and width in pixels after cropping."""
    augment: bool = True
    """Random resized crops and horizontal flips while training; otherwise resize and centre
    crop.
    """

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=3, size=self.image_size, num_classes=None)


class SyntheticImages(_Images):
    """Random images with random labels, the same on every machine: for measuring speed, not for
    learning.
    """

    builds: ClassVar[str] = "framework.recipes.image_sets.synthetic:build"
    kind: Literal["synthetic_images"] = "synthetic_images"
    num_samples: PositiveCount = 10_000
    """Training samples."""
    num_eval_samples: PositiveCount = 1_000
    """Evaluation samples."""
    image_size: PositiveCount = 224
    """Height and width in pixels."""
    channels: PositiveCount = 3
    """Channels of an image."""
    num_classes: PositiveCount = 1000
    """Labels are drawn from [0, num_classes)."""

    def num_train_samples(self) -> int:
        return self.num_samples

    def image_shape(self) -> ImageShape:
        return ImageShape(
            channels=self.channels, size=self.image_size, num_classes=self.num_classes
        )
