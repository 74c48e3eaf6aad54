"""Images of noise: they cost next to nothing to fetch, so that a measurement sees the model and not
the disk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np
import torch
from torch import Tensor

from framework.data.batches import BatchDataset, Normalise, Pixels, WholeBatch
from framework.data.order import mix, mix_int
from framework.data.splits import Splits

_POOL_SIZE: Final = 16
_STEPS_PER_UNIT: Final = 32.0  # pixels to a standard deviation
_MIDDLE: Final = 128.0


class SyntheticImages(BatchDataset):
    """Normal noise in steps of 1/32, cut at -4 and 4, from a pool of 16 images, used again by
    index; labels are a fixed function of the index.

    A sample is (image (channels, image_size, image_size) float32, label int). Memory: 16 images,
    stored as pixels and as float32, 12 MB at 3x224x224.
    """

    def __init__(
        self, num_samples: int, *, image_size: int, channels: int, num_classes: int, seed: int = 0
    ) -> None:
        """Draw the pool from a generator of its own; datasets of different seeds have other images
        and labels.
        """
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.seed = seed
        generator = torch.Generator().manual_seed(mix_int(seed))
        noise = torch.randn(_POOL_SIZE, channels, image_size, image_size, generator=generator)
        pixels = (noise * _STEPS_PER_UNIT).round() + _MIDDLE
        self._pixels = pixels.clamp(0, 255).to(torch.uint8)
        # All numbers here are exact in float32.
        scale = tuple(repeat(1 / _STEPS_PER_UNIT, channels))
        shift = tuple(repeat(-_MIDDLE / _STEPS_PER_UNIT, channels))
        self.normalise = Normalise(scale, shift)
        self._pool = self.normalise(self._pixels)
        self._keeps_pixels = False

    def in_pixels(self) -> SyntheticImages:
        """Return the same images with batches of uint8 (`batches.Pixels`)."""
        if type(self) is not SyntheticImages:
            return self
        other = copy.copy(self)
        other._keeps_pixels = True
        return other

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return image, int(label)

    def __getitems__(self, indices: Sequence[int]) -> WholeBatch:
        """Read a batch: images (B, channels, image_size, image_size) float32, labels (B,) int64."""
        numbers = np.asarray(indices, dtype=np.int64)
        labels = (mix(self.seed, numbers) % np.uint64(self.num_classes)).astype(np.int64)
        places = torch.from_numpy(numbers % _POOL_SIZE)
        if self._keeps_pixels:
            pixels = Pixels(self._pixels.index_select(0, places), self.normalise)
            return WholeBatch((pixels, torch.from_numpy(labels)))
        return WholeBatch((self._pool.index_select(0, places), torch.from_numpy(labels)))


def build(
    num_samples: int = 10_000,
    *,
    num_eval_samples: int = 1_000,
    image_size: int = 224,
    channels: int = 3,
    num_classes: int = 1000,
) -> Splits:
    """Build both splits; arguments are the keys of `config.data.SyntheticImages`."""
    make = partial(
        SyntheticImages, image_size=image_size, channels=channels, num_classes=num_classes
    )
    return Splits(make(num_samples, seed=0), make(num_eval_samples, seed=1))
