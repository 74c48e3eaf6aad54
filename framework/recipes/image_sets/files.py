"""The folders of images, as far as a laptop looks at them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from framework.config.model import ModelSection
from framework.errors import Problem
from framework.plan.rules.model import classes_problem
from framework.recipes.image_sets.kinds import ImageFolder


def look_at_folders(data: ImageFolder, model: ModelSection) -> tuple[list[Problem], None]:
    """Return a problem for each folder that is missing, or that of more classes than the model has;
    and None, as images are not counted.
    """
    problems = list(_missing_images(data))
    if not problems:
        problems += classes_problem(_count_classes(data), model)
    return problems, None


def _missing_images(data: ImageFolder) -> Iterator[Problem]:
    for name in ("root", "train_dir", "eval_dir"):
        value = getattr(data, name)
        folder = _folder(data, value if name != "root" else "")
        if not os.path.isdir(folder):  # noqa: PTH112
            yield Problem("dataset-not-found", "", key=f"data.{name}", value=value)
            if name == "root":
                return


def _folder(data: ImageFolder, name: str) -> str:
    """Return the path of a folder under the root; an empty name gives the root."""
    # pathlib raises for ~user without a user, and for names that are too long
    return os.path.join(os.path.expanduser(data.root), name)  # noqa: PTH111, PTH118


def _count_classes(data: ImageFolder) -> int:
    """Count the folders of training images, each of a class, as torchvision does; 0 where they
    cannot be read.
    """
    try:
        with os.scandir(_folder(data, data.train_dir)) as entries:
            return sum(entry.is_dir() for entry in entries)
    except OSError:
        return 0
