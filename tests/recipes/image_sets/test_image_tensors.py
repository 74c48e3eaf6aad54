from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from framework.data.order import mix
from framework.recipes.image_sets.image_tensors import ImageTensors, _crop_and_flip, _draw

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def make(num_samples: int, *, augment: bool = False, size: int = 12) -> ImageTensors:
    images = torch.randint(
        1, 256, (num_samples, 3, size, size), generator=torch.Generator().manual_seed(0)
    )
    return ImageTensors(
        images.byte(), torch.arange(num_samples) % 7, mean=MEAN, std=STD, augment=augment
    )


def pixels(batch: Tensor) -> Tensor:
    """Undo the normalisation."""
    scaled = batch * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    return (scaled * 255).round().byte()


def test_normalises_like_torchvision() -> None:
    dataset = make(5)
    normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    images, labels = dataset.__getitems__([4, 0, 4]).fields
    torch.testing.assert_close(images, normalise(dataset.images[[4, 0, 4]]))
    assert labels.tolist() == [4, 0, 4]


def test_one_sample_equals_its_place_in_a_batch() -> None:
    dataset = make(9)
    image, label = dataset[-1]
    assert torch.equal(image, dataset.__getitems__([8]).fields[0][0])
    assert (label, type(label)) == (1, int)
    with pytest.raises(IndexError):
        dataset[9]


def test_augmentation_cuts_windows_out_of_the_padded_image_and_flips_half_of_them() -> None:
    dataset = make(1, augment=True, size=6)
    padded = torch.nn.functional.pad(dataset.images[0], [4, 4, 4, 4])
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[:, top : top + 6, left : left + 6]
            windows[window.numpy().tobytes()] = (top, left, False)
            windows[window.flip(-1).numpy().tobytes()] = (top, left, True)
    seeds = mix(1, np.arange(4000))
    drawn = pixels(dataset.items_from_seeds([0] * 4000, seeds).fields[0])
    found = [windows[image.numpy().tobytes()] for image in drawn]  # KeyError: not a window at all
    assert set(found) == set(windows.values())
    assert np.mean([flip for _, _, flip in found]) == pytest.approx(0.5, abs=0.04)
    for axis in (0, 1):
        counts = np.bincount([place[axis] for place in found], minlength=9)
        assert counts.min() > 0.7 * 4000 / 9
        assert counts.max() < 1.3 * 4000 / 9


def test_augmentation_depends_on_a_sample_s_own_seed_only() -> None:
    dataset = make(6, augment=True)

    def read(order: Sequence[int]) -> Tensor:
        return dataset.items_from_seeds(order, mix(3, np.array(order))).fields[0]

    torch.testing.assert_close(read([5, 2, 0]), read(range(6))[[5, 2, 0]], rtol=0, atol=0)


def test_read_directly_it_follows_torch_s_generator() -> None:
    dataset = make(32, augment=True)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(dataset.__getitems__(range(32)).fields[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "uint8 of shape"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), "uint8 of shape"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(3).long(), r"int64 of shape \(2,\)"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2), r"int64 of shape \(2,\)"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.zeros(2).long(), "each of 1 channels"),
    ],
)
def test_wrong_tensors_are_refused(images: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageTensors(images, labels, mean=MEAN, std=STD)


@pytest.mark.parametrize("shape", [(6, 1, 5, 9), (3, 3, 12, 8)])
def test_windows_are_those_of_a_gather_pixel_by_pixel(shape: tuple[int, ...]) -> None:
    """The gather, which takes five times as long, is the definition."""
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    batch, channels, height, width = shape
    seeds = mix(9, np.arange(batch))
    top, left, flip = (
        torch.from_numpy(_draw(seeds, purpose=purpose, bound=bound))
        for purpose, bound in ((1, 9), (2, 9), (3, 2))
    )
    columns = torch.where(
        flip.bool()[:, None], width - 1 - torch.arange(width), torch.arange(width)
    )
    padded = torch.nn.functional.pad(images, [4, 4, 4, 4])
    expected = padded[
        torch.arange(batch)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        (top[:, None] + torch.arange(height))[:, None, :, None],
        (left[:, None] + columns)[:, None, None, :],
    ]
    assert torch.equal(_crop_and_flip(images, seeds), expected)
