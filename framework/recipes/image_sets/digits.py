"""scikit-learn's handwritten digits: 1,797 real images in the package itself, for runs that need no
download.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.functional import interpolate

from framework.data.splits import Splits
from framework.recipes.image_sets.image_tensors import ImageTensors

NUM_EVALUATION: Final = 360
_SPLIT_SEED: Final = 0
_BRIGHTEST: Final = 16.0


def build(image_size: int = 28) -> Splits:
    """Split the digits 1,437 / 360, every digit with the same share in both, in the same way on
    every machine.

    Returns:
        Grey images (1, image_size, image_size), normalised with the mean and standard deviation of
        the training images, and labels 0 to 9. Source: Alpaydin and Kaynak 1998, "Optical
        Recognition of Handwritten Digits", its test part.
    """
    images, targets, parts, mean, std = _read(image_size)
    train, evaluation = (
        ImageTensors(images[part], targets[part], mean=[mean], std=[std]) for part in parts
    )
    return Splits(train, evaluation)


@lru_cache(maxsize=2)  # a process may train many runs on them
def _read(image_size: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], float, float]:
    """Return all images and labels, the indices of both parts, and mean and standard deviation of
    the first part.
    """
    originals, labels = load_digits(return_X_y=True)
    images = _enlarge(torch.from_numpy(originals).float().view(-1, 1, 8, 8), image_size)
    train, evaluation = train_test_split(
        np.arange(len(labels)), test_size=NUM_EVALUATION, stratify=labels, random_state=_SPLIT_SEED
    )
    std, mean = torch.std_mean(images[train].double() / 255.0)
    parts = torch.from_numpy(train), torch.from_numpy(evaluation)
    return images, torch.from_numpy(labels).long(), parts, mean.item(), std.item()


def _enlarge(images: Tensor, image_size: int) -> Tensor:
    """Enlarge float images (N, 1, 8, 8) of values 0 to 16 to uint8 (N, 1, image_size, image_size)
    of values 0 to 255.
    """
    resized = interpolate(
        images, size=(image_size, image_size), mode="bilinear", align_corners=False
    )
    return (resized * (255.0 / _BRIGHTEST)).round().to(torch.uint8)
