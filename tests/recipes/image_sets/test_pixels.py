"""Images that stay uint8 until they are on the device: the same numbers, in a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Subset
from torchvision.transforms import v2

from framework.data.batches import Pixels, in_pixels
from framework.data.loaders import EvalLoader
from framework.engine.copies_ahead import BatchesAhead
from framework.engine.step_batches import DeviceBatches
from framework.recipes.image_sets import digits, image_folder
from framework.recipes.image_sets.image_tensors import ImageTensors
from framework.recipes.image_sets.synthetic import SyntheticImages
from framework.tasks.from_callable import as_task
from framework.tasks.task import Task
from tests.data.loader_of import train_loader
from tests.engine.late_streams import LateStreams

CPU = torch.device("cpu")
SHARE = {"global_size": 4, "micro_size": 4, "accumulation_steps": 1, "rank": 0, "world_size": 1}
TASK = as_task(nn.functional.cross_entropy)


def folder_of_images(root: Path) -> Path:
    """Write images of several sizes, in two classes for training and evaluation each."""
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("a", "b"):
            place = root / part / name
            place.mkdir(parents=True)
            for number in range(6):
                size = (40 + 3 * number, 50 - 2 * number, 3)
                pixels = draw.integers(0, 256, size, dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    return root


def augmented() -> ImageTensors:
    """Return images that are cropped and flipped at random."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 3, 12, 12), dtype=torch.uint8, generator=draw)
    statistics = {"mean": (0.49, 0.48, 0.45), "std": (0.247, 0.244, 0.262)}
    return ImageTensors(images, torch.arange(24), augment=True, **statistics)


@pytest.fixture(params=["digits", "augmented", "synthetic", "folder", "folder-eval"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Yield each of our image sets."""
    if request.param == "digits":
        return Subset(digits.build(12).train, range(24)).dataset
    if request.param == "augmented":
        return augmented()
    if request.param == "synthetic":
        return SyntheticImages(24, image_size=9, channels=3, num_classes=5)
    splits = image_folder.build(str(folder_of_images(tmp_path)), image_size=32)
    return splits.train if request.param == "folder" else splits.evaluation


def batches(dataset: Any, count: int = 3) -> Iterator[Any]:
    """Read the first micro-batches, as a run does."""
    stream = train_loader(dataset, **SHARE, seed=3, random_samples=True).stream(1)
    for _ in range(count):
        yield next(stream)
    stream.close()


def same(first: Any, second: Any) -> bool:
    """Check whether two pairs of images and labels are equal to the bit."""
    return torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_a_model_reads_is_equal_to_the_bit(dataset: Any, channels_last: bool) -> None:
    """Also on a copying stream, in bf16, and with the seeds of a run's augmentation."""
    before = DeviceBatches(CPU, torch.bfloat16, channels_last)
    after = DeviceBatches(CPU, torch.bfloat16, channels_last, streams=LateStreams())
    images_of = in_pixels(dataset)
    assert images_of is not dataset
    ahead = BatchesAhead(batches(images_of), after.begin, count=3)
    for plain in batches(dataset):
        batch = next(ahead)
        pixels = batch.batch[0]
        assert isinstance(pixels, Pixels)
        assert pixels.images.dtype == torch.uint8
        read = after.split(TASK, batch)
        expected = before.split(TASK, plain)
        assert same(read, expected)
        if channels_last:
            assert read[0].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(after.move(batch)[0], plain[0]), "in float32, too"


def test_a_quarter_of_the_bytes_is_copied(dataset: Any) -> None:
    (plain,) = batches(dataset, 1)
    (batch,) = batches(in_pixels(dataset), 1)
    assert 4 * batch[0].images.nbytes == plain[0].nbytes
    streams = LateStreams()
    DeviceBatches(CPU, streams=streams).move(batch)
    assert streams.order == ["copy", "copy", "mark", "wait"]


def test_evaluation_reads_the_same(dataset: Any) -> None:
    moving = DeviceBatches(CPU)
    options = {"batch_size": 7, "rank": 0, "world_size": 1, "max_samples": 12}
    plain = list(EvalLoader(dataset, **options))
    pixels = list(EvalLoader(in_pixels(dataset), **options))
    assert len(plain) == len(pixels) == 2
    for (batch, counts), (other, other_counts) in zip(plain, pixels, strict=True):
        assert isinstance(other[0], Pixels)
        assert counts == other_counts
        assert same(moving.move(other), batch)


def test_a_sample_is_what_it_was(dataset: Any) -> None:
    """Predictions and a user's own loader read samples of the dataset itself."""
    image, _ = dataset[1]
    assert image.dtype == torch.float32


def test_the_folder_is_normalised_as_torchvision_does(tmp_path: Path) -> None:
    found = image_folder.build(str(folder_of_images(tmp_path)), image_size=32).evaluation
    assert isinstance(found.transform.transforms[-1], v2.Normalize)
    assert isinstance(found.transform.transforms[-2], v2.ToDtype)
    every = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256).contiguous()
    expected = v2.Compose(found.transform.transforms[-2:])(every)
    assert torch.equal(image_folder._NORMALISE(every), expected)


def test_own_changes_of_a_dataset_stay(tmp_path: Path) -> None:
    """What would be lost in pixels is read as before."""
    found = image_folder.build(str(folder_of_images(tmp_path)), image_size=32).train

    class Brighter(ImageTensors):
        def __getitems__(self, indices: Any) -> Any:
            return super().__getitems__(indices)

    images = augmented()
    brighter = Brighter(images.images, images.labels, mean=[0.5] * 3, std=[0.5] * 3)
    assert in_pixels(brighter) is brighter
    found.transform = v2.Compose([found.transform])
    assert in_pixels(found) is found
    assert in_pixels([1]) == [1]


class OnHost(Task):
    """Looks at the images of a batch on the host."""

    seen: Tensor

    def on_host(self, batch: Any) -> Any:
        self.seen = batch[0]
        return [2 * batch[0], batch[1]]

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return torch.zeros(())


def test_a_task_that_works_on_the_host_gets_samples() -> None:
    task = OnHost()
    (plain,) = batches(augmented(), 1)
    (batch,) = batches(in_pixels(augmented()), 1)
    inputs, _ = DeviceBatches(CPU).split(task, batch)
    assert torch.equal(task.seen, plain[0])
    assert torch.equal(inputs, 2 * plain[0])


def test_workers_send_pixels() -> None:
    loader = train_loader(in_pixels(augmented()), **SHARE, seed=3, num_workers=1)
    stream = loader.stream(0)
    batch = next(stream)
    stream.close()
    assert isinstance(batch[0], Pixels)
    assert batch[0].images.dtype == torch.uint8
