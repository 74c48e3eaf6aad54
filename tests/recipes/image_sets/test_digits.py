from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from framework.recipes.image_sets.digits import build
from framework.recipes.image_sets.image_tensors import ImageTensors
from framework.recipes.image_sets.kinds import Digits


def images_of(dataset: object) -> tuple[Tensor, Tensor]:
    assert isinstance(dataset, ImageTensors)
    return dataset.images, dataset.labels


def test_splits_all_digits_as_declared() -> None:
    splits = build(8)
    (train, train_labels), (evaluation, evaluation_labels) = (
        images_of(splits.train),
        images_of(splits.evaluation),
    )
    assert (len(train), len(evaluation)) == (Digits().num_train_samples(), 360)
    originals, labels = load_digits(return_X_y=True)
    rows = sorted(map(tuple, torch.cat([train, evaluation]).flatten(1).tolist()))
    assert rows == sorted(
        map(tuple, (torch.from_numpy(originals) * 255 / 16).round().int().tolist())
    )
    shares = torch.bincount(train_labels).double() / torch.bincount(torch.from_numpy(labels))
    assert ((shares - 0.8).abs() < 0.005).all()
    assert torch.bincount(evaluation_labels).min() > 30


def test_two_builds_are_equal() -> None:
    for first, second in zip(images_of(build(8).train), images_of(build(8).train), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("image_size", [8, 28, 32])
def test_training_images_are_normalised(image_size: int) -> None:
    train = build(image_size).train
    images = train.__getitems__(range(1437)).fields[0]  # type: ignore[attr-defined]
    assert images.shape == (1437, 1, image_size, image_size)
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)


def test_enlarging_keeps_the_picture() -> None:
    small, large = images_of(build(8).train)[0], images_of(build(32).train)[0]
    back = torch.nn.functional.avg_pool2d(large.float(), 4)
    correlation = torch.corrcoef(torch.stack([back.flatten(), small.float().flatten()]))[0, 1]
    assert correlation > 0.95
