"""The folders of images, as far as a laptop looks at them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from framework.config.model import ModelSection
from framework.errors import Problem
from framework.recipes.image_sets.kinds import ImageFolder


def look_at_folders(data: ImageFolder, model: ModelSection) -> tuple[list[Problem], None]:
    """Return a problem for each folder that is missing; and None, as images are not counted."""
    return list(_missing_images(data)), None


def _missing_images(data: ImageFolder) -> Iterator[Problem]:
    for name in ("root", "train_dir", "eval_dir"):
        value = getattr(data, name)
        # pathlib raises for ~user without a user, and for names that are too long
        folder = os.path.expanduser(data.root)  # noqa: PTH111
        if name != "root":
            folder = os.path.join(folder, value)  # noqa: PTH118
        if not os.path.isdir(folder):  # noqa: PTH112
            yield Problem("dataset-not-found", "", key=f"data.{name}", value=value)
            if name == "root":
                return
