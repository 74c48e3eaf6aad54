"""Decoded images of a small folder, held in memory that a rank shares with its loader's workers:
each image is decoded once in a run, and not once in every epoch.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from framework.system.limits import room

MOST_IMAGES: Final = 20_000
"""Of a folder with more, not even the sizes are read, which takes 0.1 ms each."""
MOST_BYTES: Final = 1 << 30
# Of the memory that is free, for each dataset of each rank of a host.
_LEAST_SHARE: Final = 32
_CHANNELS: Final = 3


def sizes_of(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return width and height of images (N, 2) by their headers; 0 for an image that cannot be
    opened, which is reported when it is read.
    """
    sizes = np.zeros((len(paths), 2), np.int64)
    for number, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                sizes[number] = image.size
        # Pillow reports broken PNG chunks as SyntaxError.
        except (OSError, SyntaxError, ValueError):
            continue
    return sizes


class DecodedImages:
    """RGB images of known sizes; each is kept when it is first decoded.

    Workers are forked after this was made, and map the same memory. Two that decode one image at
    the same time write the same bytes. A process that is not forked has none.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        """Reserve memory, which is taken as images come.

        Args:
            sizes: width and height (N, 2) of each image; 0 for one that is not kept.
        """
        self._sizes = sizes
        counts = sizes.prod(axis=1) * _CHANNELS
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._pixels: Any = mmap.mmap(-1, int(self._ends[-1]))
        self._is_kept: Any = mmap.mmap(-1, len(sizes))  # a byte each, 1 if the image is there

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        return len(self._pixels) if self._pixels is not None else 0

    def read(self, index: int, decode: Callable[[], Image.Image]) -> Image.Image:
        """Return an image, by `decode` if it is not kept."""
        size = tuple(self._sizes[index].tolist())
        place = slice(int(self._starts[index]), int(self._ends[index]))
        if self._is_kept is not None and self._is_kept[index]:
            return Image.frombytes("RGB", size, self._pixels[place])
        image = decode()
        if self._is_kept is not None and image.size == size:
            self._pixels[place] = image.tobytes()
            self._is_kept[index] = 1
        return image

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pixels": None, "_is_kept": None}


def decoded_images(sizes: npt.NDArray[np.int64]) -> DecodedImages | None:
    """Return a place for the images of a folder; None if their sizes are not known, or they take
    more memory than `MOST_BYTES` or than a small part of what is free.
    """
    num_bytes = int(sizes.prod(axis=1).sum()) * _CHANNELS
    limit = MOST_BYTES
    free = room()
    if free is not None:
        limit = min(limit, free.num_bytes // _LEAST_SHARE)
    if not 0 < num_bytes <= limit:
        return None
    return DecodedImages(sizes)
