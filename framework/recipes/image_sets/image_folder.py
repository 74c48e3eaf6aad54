"""Folders of image files, one per class."""

from __future__ import annotations

import copy
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder, VisionDataset  # type: ignore[import-untyped]
from torchvision.datasets.folder import (  # type: ignore[import-untyped]
    IMG_EXTENSIONS,
    find_classes,
    make_dataset,
)
from torchvision.transforms import v2  # type: ignore[import-untyped]

from framework.data.batches import Normalise, Pixels, collate
from framework.data.splits import Splits
from framework.errors import ConfigError, Problem, TrainingError
from framework.recipes.image_sets.decoded import MOST_IMAGES, decoded_images, sizes_of
from framework.system.host_value import HostValue, made_once_on_host

# Of ImageNet's training images in [0, 1], as torchvision publishes them for its models.
_MEAN: Final = [0.485, 0.456, 0.406]
_STD: Final = [0.229, 0.224, 0.225]
# As torchvision computes it: its last two transforms.
_NORMALISE: Final = Normalise(1.0 / 255, tuple(-value for value in _MEAN), divisor=tuple(_STD))
_NUM_NORMALISING: Final = 2
_RESIZE_RATIO: Final = 256 / 224
_SHOWN_NAMES: Final = 3


def build(
    root: str,
    *,
    train_dir: str = "train",
    eval_dir: str = "val",
    image_size: int = 224,
    augment: bool = True,
) -> Splits:
    """Build datasets of ``<root>/<train_dir>/<class>/*`` and ``<root>/<eval_dir>/<class>/*``;
    classes are numbered in alphabetical order.

    Args:
        root: folder of both splits.
        train_dir: sub-folder of the training images.
        eval_dir: sub-folder of the evaluation images; it must hold the same classes.
        image_size: height and width in pixels after cropping.
        augment: random resized crops and horizontal flips while training; otherwise the shorter
            side is resized to image_size x 256 / 224 and the centre cut out, as for evaluation.

    Returns:
        RGB images (3, image_size, image_size) float32, normalised with ImageNet's statistics. Both
        datasets have `classes`, the list of names.

    Raises:
        ConfigError: kinds ``dataset-not-found``, ``dataset-no-classes``,
            ``dataset-classes-differ``, ``dataset-no-images``.
    """
    folder = Path(root).expanduser()
    sub_folders = {"data.train_dir": train_dir, "data.eval_dir": eval_dir}

    def list_both() -> list[Any]:
        problems = list(_problems(folder, root=root, sub_folders=sub_folders))
        if problems:
            raise ConfigError(problems)
        return [_list(folder / name, root=root) for name in sub_folders.values()]

    listings = made_once_on_host(repr((root, str(Path.cwd()), train_dir, eval_dir)), list_both)
    return Splits(
        _ImageFolder(folder / train_dir, transform(image_size, augment=augment), listings, 0),
        _ImageFolder(folder / eval_dir, transform(image_size, augment=False), listings, 1),
    )


def _problems(folder: Path, *, root: str, sub_folders: dict[str, str]) -> Iterator[Problem]:
    """Yield the problems that show without listing the images; `sub_folders` is key -> name."""
    if not folder.is_dir():
        yield Problem(
            "dataset-not-found",
            f"there is no folder {folder}",
            "name an existing folder",
            "data.root",
            root,
        )
        return
    classes: dict[str, set[str]] = {}
    for key, name in sub_folders.items():
        place = folder / name
        if not place.is_dir():
            yield Problem(
                "dataset-not-found", f"there is no folder {place}", _layout(root, name), key, name
            )
            continue
        with suppress(FileNotFoundError):
            classes[key] = set(find_classes(str(place))[0])
        if not classes.get(key):
            yield Problem(
                "dataset-no-classes", f"{place} has no sub-folders", _layout(root, name), key, name
            )
    train = classes.get("data.train_dir", set())
    evaluation = classes.get("data.eval_dir", set())
    if train and evaluation and train != evaluation:
        eval_name = sub_folders["data.eval_dir"]
        differences = []
        if train - evaluation:
            train_name = sub_folders["data.train_dir"]
            differences.append(f"only {train_name} has {_names(train - evaluation)}")
        if evaluation - train:
            differences.append(f"only {eval_name} has {_names(evaluation - train)}")
        # Classes are numbered by name, so a missing one shifts the labels of all that follow.
        yield Problem(
            "dataset-classes-differ",
            f"training and evaluation have different classes: {', '.join(differences)}",
            "give both the same sub-folders",
            "data.eval_dir",
            eval_name,
        )


class _Paths(Sequence[tuple[str, int]]):
    """Paths and class numbers of a folder's images; the names are one buffer that the processes of
    a host share.
    """

    def __init__(self, place: Path, listings: HostValue, number: int) -> None:
        """Take the folder, the results of `_list` for all folders, and which of these is its."""
        self._prefix = _prefix(place)
        self._listings = listings
        self._number = number

    def __len__(self) -> int:
        return len(self._arrays()[2])

    @overload
    def __getitem__(self, index: int) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, int] | list[tuple[str, int]]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return [self[number] for number in range(start, stop, step)]
        names, ends, labels = self._arrays()
        index = range(len(labels))[index]  # also from the end
        name = os.fsdecode(names[ends[index] : ends[index + 1]].tobytes())
        return self._prefix + name, int(labels[index])

    def labels(self) -> list[int]:
        """Return all class numbers."""
        return list(map(int, self._arrays()[2]))

    def _arrays(self) -> tuple[Any, Any, Any]:
        _, names, ends, labels, _ = self._listings.value[self._number]
        return names, ends, labels


def _prefix(place: Path) -> str:
    # As torchvision begins its paths, also for the places "." and "/".
    return os.path.join(place, "")  # noqa: PTH118


class _ImageFolder(ImageFolder):  # type: ignore[misc]
    """torchvision's dataset over images that have been listed."""

    def __init__(self, place: Path, transform: Any, listings: HostValue, number: int) -> None:
        VisionDataset.__init__(self, str(place), transform=transform)
        self.loader = read_image
        self.extensions = IMG_EXTENSIONS
        self.classes = listings.value[number][0]
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.samples = _Paths(place, listings, number)
        self.imgs = self.samples
        self._own_transform = transform
        self._decoded = decoded_images(listings.value[number][4])

    @property
    def stated(self) -> str:
        """Describe the memory of images that are held decoded; empty if none are."""
        if self._decoded is None:
            return ""
        megabytes = self._decoded.num_bytes / 1e6
        part = Path(self.root).name
        return (
            f"{part}: {len(self):,} images, held decoded in up to {megabytes:,.0f} MB of each rank"
        )

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._decoded is None or self.loader is not read_image:
            sample: tuple[Any, Any] = super().__getitem__(index)
            return sample
        index = range(len(self))[index]
        path, target = self.samples[index]
        image = self._decoded.read(index, partial(read_image, path))
        made: Any = image
        if self.transform is not None:
            made = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return made, target

    def in_pixels(self) -> _ImageFolder:
        """Return the same images with batches of uint8 (`batches.Pixels`), as long as their
        transform is the one that they were made with.
        """
        if type(self) is not _ImageFolder or self.transform is not self._own_transform:
            return self
        if self.target_transform is not None:
            return self
        other = copy.copy(self)
        other.transform = v2.Compose(self.transform.transforms[:-_NUM_NORMALISING])
        other.collate_fn = _batch_of_pixels
        return other

    @property
    def targets(self) -> list[int]:
        return self.samples.labels()


def _list(place: Path, *, root: str) -> tuple[list[str], Any, Any, Any, Any]:
    """List the images as torchvision does, class by class. Returns the names of the classes, the
    names of the images as one buffer, the end of each in it (after a first 0), the class numbers,
    and width and height of each image, unless there are many.

    Raises:
        ConfigError: kind ``dataset-no-images``: a class has none; it names all such classes.
    """
    names = bytearray()
    ends = array("q", [0])
    counts = []
    paths: list[str] = []
    empty: dict[str, int] = {}  # classes without images, as keys that torchvision takes
    try:
        classes, _ = find_classes(str(place))
        for name in classes:
            images = make_dataset(str(place), {name: 0}, IMG_EXTENSIONS, allow_empty=True)
            for path, _ in images:
                paths.append(path)
                names += os.fsencode(path[len(_prefix(place)) :])
                ends.append(len(names))
            counts.append(len(images))
            if not images:
                empty[name] = 0
        if empty:
            make_dataset(str(place), empty, IMG_EXTENSIONS)  # raises one error for all of them
    except FileNotFoundError as error:
        reason = f"{place}: {' '.join(str(error).split())}"
        raise ConfigError.of(
            "dataset-no-images", reason, _layout(root, place.name), "data.root", root
        ) from error
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    sizes = np.zeros((0, 2), np.int64)
    if len(labels) <= MOST_IMAGES:
        sizes = sizes_of(paths)
    buffers = np.frombuffer(names, np.uint8), np.frombuffer(ends, np.int64)
    return classes, *buffers, labels, sizes


def read_image(path: str) -> Image.Image:
    """Decode an image file to RGB.

    Raises:
        TrainingError: the file cannot be read or decoded; unlike Pillow's own messages it names
            the file.
    """
    try:
        with Image.open(path) as image:
            rgb: Image.Image = image.convert("RGB")
            return rgb
    # Pillow reports broken PNG chunks as SyntaxError.
    except (OSError, SyntaxError, ValueError) as error:
        raise TrainingError(
            f"{path}: cannot be read as an image ({error}); replace or remove the file"
        ) from error


def _batch_of_pixels(samples: Sequence[tuple[Any, int]]) -> tuple[Pixels, Any]:
    """Make a batch of uint8 images and their class numbers."""
    images, labels = collate(samples)
    return Pixels(images, _NORMALISE), labels


def transform(image_size: int, *, augment: bool) -> v2.Transform:
    """Make the transform of a PIL image to (3, image_size, image_size) float32. Cropping comes
    first, so that few pixels become floats.
    """
    if augment:
        transforms = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
    else:
        transforms = [v2.Resize(round(image_size * _RESIZE_RATIO)), v2.CenterCrop(image_size)]
    transforms.append(v2.ToImage())
    transforms.append(v2.ToDtype(torch.float32, scale=True))
    transforms.append(v2.Normalize(_MEAN, _STD))
    return v2.Compose(transforms)


def _layout(root: str, name: str) -> str:
    return f"put images into {root}/{name}/<class>/"


def _names(names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN_NAMES]
    text = ", ".join(shown)
    if len(names) > len(shown):
        text += f" and {len(names) - len(shown)} more"
    return text
