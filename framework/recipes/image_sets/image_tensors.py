"""Images in memory, fetched a batch at a time; torchvision is not imported for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from framework.data.batches import BatchDataset, Normalise, Pixels, WholeBatch
from framework.data.order import Seeds, mix

_PADDING: Final = 4
_NUM_OFFSETS: Final = 2 * _PADDING + 1


class ImageTensors(BatchDataset):
    """Images stored as uint8 and read as normalised float32, a whole batch at once instead of one
    by one.

    A sample is (image (C, H, W) float32, label int). `__getitems__` returns a whole batch, so a
    `DataLoader` of your own over this dataset needs
    ``collate_fn=framework.data.batches.collate``.

    With `augment`, an image is cropped at random out of itself padded by 4 black pixels, and
    flipped left to right half of the time. Read through a training loader, both depend on (seed,
    epoch, sample index) alone; read directly, they draw from torch's default generator.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool = False,
    ) -> None:
        """Take the images; nothing is copied.

        Args:
            images: (N, C, H, W), uint8.
            labels: (N,), int64.
            mean: per channel, of pixel values scaled to [0, 1].
            std: per channel, of pixel values scaled to [0, 1]; positive.
            augment: random crops and flips.

        Raises:
            ValueError: shapes or dtypes are not as above.
        """
        _check(images, labels, num_statistics=(len(mean), len(std)))
        self.images = images
        self.labels = labels
        self.augment = augment
        # (pixel / 255 - mean) / std as one multiplication and one addition.
        scale = 1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(mean, dtype=torch.float64) / torch.tensor(std)
        self.normalise = Normalise(tuple(scale.tolist()), tuple(shift.tolist()))
        self._keeps_pixels = False

    def in_pixels(self) -> ImageTensors:
        """Return the same images with batches of uint8 (`batches.Pixels`); a class derived
        from this one may read them in another way, and is returned as it is.
        """
        if type(self) is not ImageTensors:
            return self
        other = copy.copy(self)
        other._keeps_pixels = True
        return other

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return image, int(label)

    def __getitems__(self, indices: Sequence[int]) -> WholeBatch:
        """Read a batch: images (B, C, H, W) float32 and labels (B,) int64."""
        if not self.augment:
            return self._batch(self.images[torch.as_tensor(indices)], indices)
        seeds = torch.randint(torch.iinfo(torch.int64).max, (len(indices),))
        return self.items_from_seeds(indices, seeds.numpy().astype(np.uint64))

    def items_from_seeds(self, indices: Sequence[int], seeds: Seeds) -> WholeBatch:
        """Read a batch as `__getitems__` does, with every sample's augmentation decided by its own
        seed, uint64 (B,) (see `batches.DrawsFromSeeds`).
        """
        images = self.images[torch.as_tensor(indices)]
        if self.augment:
            images = _crop_and_flip(images, seeds)
        return self._batch(images, indices)

    def _batch(self, images: Tensor, indices: Sequence[int]) -> WholeBatch:
        labels = self.labels[torch.as_tensor(indices)]
        if self._keeps_pixels:
            return WholeBatch((Pixels(images, self.normalise), labels))
        return WholeBatch((self.normalise(images), labels))


def _crop_and_flip(images: Tensor, seeds: Seeds) -> Tensor:
    """Cut a window out of every padded image and mirror half of them.

    Args:
        images: (B, C, H, W).
        seeds: (B,); three independent draws are hashed out of each.

    Returns:
        (B, C, H, W) of the same dtype.
    """
    batch, _, height, width = images.shape
    top = _draw(seeds, purpose=1, bound=_NUM_OFFSETS)
    left = _draw(seeds, purpose=2, bound=_NUM_OFFSETS)
    is_flipped = _draw(seeds, purpose=3, bound=2).astype(bool)
    padded = pad(images, [_PADDING, _PADDING, _PADDING, _PADDING]).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    # Four indices for each image, and not for each pixel, which takes five times as long.
    cut = windows[np.arange(batch), :, top, left]
    cut[is_flipped] = cut[is_flipped, ..., ::-1]
    return torch.from_numpy(cut)


def _draw(seeds: Seeds, *, purpose: int, bound: int) -> npt.NDArray[np.int64]:
    """Draw integers in [0, bound), (B,); `purpose` distinguishes the draws of one sample."""
    drawn: npt.NDArray[np.int64] = (mix(seeds, purpose) % np.uint64(bound)).astype(np.int64)
    return drawn


def _check(images: Any, labels: Any, *, num_statistics: tuple[int, int]) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"images must be uint8 of shape (N, C, H, W), not {images.dtype} {tuple(images.shape)}"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"labels must be int64 of shape ({len(images)},), not {labels.dtype} "
            f"{tuple(labels.shape)}"
        )
    if num_statistics != (images.shape[1], images.shape[1]):
        raise ValueError(
            f"mean and std must have one value for each of {images.shape[1]} channels, not "
            f"{num_statistics}"
        )
