"""Images in folders named after their class, read and decoded as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]
from torchvision.datasets.folder import find_classes  # type: ignore[import-untyped]
from torchvision.transforms import v2  # type: ignore[import-untyped]

from framework.data.splits import Splits
from framework.errors import ConfigError, Problem, TrainingError

# Of ImageNet's training images in [0, 1], as torchvision publishes them for its models.
_MEAN: Final = [0.485, 0.456, 0.406]
_STD: Final = [0.229, 0.224, 0.225]
_RESIZE_RATIO: Final = 256 / 224
_SHOWN_NAMES: Final = 3


def build(
    root: str, *, train_dir: str = "train", eval_dir: str = "val", image_size: int = 224, augment: bool = True
) -> Splits:
    """``<root>/<train_dir>/<class>/*`` and ``<root>/<eval_dir>/<class>/*``; classes are numbered in alphabetical order.

    Args:
        root: folder of both splits.
        train_dir: sub-folder of the training images.
        eval_dir: sub-folder of the evaluation images; it must hold the same classes.
        image_size: height and width in pixels after cropping.
        augment: random resized crops and horizontal flips while training; otherwise the shorter side is resized to
            image_size x 256 / 224 and the centre cut out, as for evaluation.

    Returns:
        RGB images (3, image_size, image_size) float32, normalised with ImageNet's statistics. Both datasets have
        `classes`, the list of names.

    Raises:
        ConfigError: kinds ``dataset-not-found``, ``dataset-no-classes``, ``dataset-classes-differ``,
            ``dataset-no-images``.
    """
    folder = Path(root).expanduser()
    problems = list(_problems(folder, root=root, sub_folders={"data.train_dir": train_dir, "data.eval_dir": eval_dir}))
    if problems:
        raise ConfigError(problems)
    plain = _transform(image_size, augment=False)
    return Splits(
        train=_open(
            folder / train_dir, root=root, transform=_transform(image_size, augment=True) if augment else plain
        ),
        evaluation=_open(folder / eval_dir, root=root, transform=plain),
    )


def _problems(folder: Path, *, root: str, sub_folders: dict[str, str]) -> Iterator[Problem]:
    """What can be seen without listing the images."""
    if not folder.is_dir():
        yield Problem("dataset-not-found", f"there is no folder {folder}", "name an existing folder", "data.root", root)
        return
    classes: dict[str, set[str]] = {}
    for key, name in sub_folders.items():
        place = folder / name
        if not place.is_dir():
            yield Problem("dataset-not-found", f"there is no folder {place}", _layout(root, name), key, name)
            continue
        classes[key] = _class_names(place)
        if not classes[key]:
            yield Problem("dataset-no-classes", f"{place} has no sub-folders", _layout(root, name), key, name)
    train, evaluation = (classes.get(key, set()) for key in sub_folders)
    if train and evaluation and train != evaluation:
        train_name, eval_name = sub_folders.values()
        only = [
            f"only {name} has {_names(extra)}"
            for name, extra in ((train_name, train - evaluation), (eval_name, evaluation - train))
            if extra
        ]
        # Classes are numbered by name, so a missing one shifts the labels of all that follow.
        yield Problem(
            "dataset-classes-differ",
            f"training and evaluation have different classes: {', '.join(only)}",
            "give both the same sub-folders",
            "data.eval_dir",
            eval_name,
        )


def _open(place: Path, *, root: str, transform: Any) -> ImageFolder:
    try:
        return ImageFolder(str(place), transform=transform, loader=_read_image)
    except FileNotFoundError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            Problem("dataset-no-images", f"{place}: {reason}", _layout(root, place.name), "data.root", root)
        ) from error


def _read_image(path: str) -> Image.Image:
    """Decode an image file to RGB; a damaged one is named, which Pillow's own messages do not do.

    Raises:
        TrainingError: the file cannot be read or decoded.
    """
    try:
        with Image.open(path) as image:
            rgb: Image.Image = image.convert("RGB")
            return rgb
    except (OSError, SyntaxError, ValueError) as error:  # Pillow reports broken PNG chunks as SyntaxError
        raise TrainingError(f"{path}: cannot be read as an image ({error}); replace or remove the file") from error


def _transform(image_size: int, *, augment: bool) -> v2.Transform:
    """PIL image -> (3, image_size, image_size) float32. Cropping comes first, so that few pixels become floats."""
    if augment:
        cropped = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
    else:
        cropped = [v2.Resize(round(image_size * _RESIZE_RATIO)), v2.CenterCrop(image_size)]
    return v2.Compose([*cropped, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)])


def _class_names(place: Path) -> set[str]:
    try:
        return set(find_classes(str(place))[0])
    except FileNotFoundError:
        return set()


def _layout(root: str, name: str) -> str:
    return f"put images into {root}/{name}/<class>/"


def _names(names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
