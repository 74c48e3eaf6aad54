"""Images of a folder are decoded once, and are then what a file has."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from framework.errors import TrainingError
from framework.recipes.image_sets import decoded, image_folder
from framework.recipes.image_sets.decoded import decoded_images, sizes_of
from tests.recipes.image_sets.test_pixels import folder_of_images


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the images that are decoded."""
    counts = Counter[str]()
    read_image = image_folder.read_image

    def counted(path: str) -> Any:
        counts[path] += 1
        return read_image(path)

    monkeypatch.setattr(image_folder, "read_image", counted)
    return counts


def test_an_image_is_decoded_once(tmp_path: Path, decodings: Counter[str]) -> None:
    found = image_folder.build(str(folder_of_images(tmp_path)), image_size=32, augment=False)
    samples = [found.train[number] for number in range(len(found.train))]
    again = [found.train[number - len(samples)] for number in range(len(samples))]
    assert set(decodings.values()) == {1}
    assert len(decodings) == 12
    for (image, label), (other, other_label) in zip(samples, again, strict=True):
        assert torch.equal(image, other)
        assert label == other_label
    assert found.train.stated == "train: 12 images, held decoded in up to 0 MB of each rank"


def test_workers_and_the_form_in_pixels_share_them(tmp_path: Path, decodings: Counter[str]) -> None:
    found = image_folder.build(str(folder_of_images(tmp_path)), image_size=32).train
    loader = torch.utils.data.DataLoader(found, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 12
    pixels = found.in_pixels()
    for number in range(12):
        pixels[number]
    assert not decodings, "the worker has decoded them"


def test_what_is_too_large_is_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decodings: Counter[str]
) -> None:
    root = str(folder_of_images(tmp_path))
    monkeypatch.setattr(decoded, "MOST_BYTES", 1000)
    found = image_folder.build(root, image_size=32).train
    assert found.stated == ""
    monkeypatch.undo()
    monkeypatch.setattr(image_folder, "MOST_IMAGES", 11)
    other = image_folder.build(root, image_size=32).train
    assert other.stated == ""


def test_a_process_that_is_not_forked_decodes_by_itself(tmp_path: Path) -> None:
    image = Image.fromarray(np.full((4, 5, 3), 7, np.uint8))
    held = decoded_images(np.array([[5, 4], [0, 0]]))
    assert held is not None
    assert held.read(0, lambda: image) is image
    assert held.read(0, lambda: pytest.fail("it is there")).tobytes() == image.tobytes()
    assert held.read(1, lambda: image) is image  # of a size that was not known
    assert held.read(1, lambda: image) is image
    assert pickle.loads(pickle.dumps(held)).read(0, lambda: image) is image


def test_a_damaged_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path)
    path = root / "train/a/0.png"
    path.write_bytes(b"no image")
    assert sizes_of([str(path)]).tolist() == [[0, 0]]
    found = image_folder.build(str(root), image_size=32).train
    with pytest.raises(TrainingError, match="cannot be read as an image"):
        found[0]
