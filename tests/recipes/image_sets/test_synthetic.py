from __future__ import annotations

import torch

from framework.recipes.image_sets.image_tensors import ImageTensors
from framework.recipes.image_sets.synthetic import SyntheticImages, build

SMALL = {"image_size": 5, "channels": 2, "num_classes": 3}


def test_has_the_asked_sizes() -> None:
    splits = build(100, num_eval_samples=7, image_size=5, channels=2, num_classes=3)
    assert (len(splits.train), len(splits.evaluation)) == (100, 7)  # type: ignore[arg-type]
    image, label = splits.train[99]
    assert (image.shape, image.dtype, type(label)) == ((2, 5, 5), torch.float32, int)
    assert not isinstance(splits.train, ImageTensors)


def test_the_same_on_every_build_and_for_any_global_seed() -> None:
    torch.manual_seed(1)
    first = SyntheticImages(50, **SMALL).__getitems__(range(50)).fields
    torch.manual_seed(2)
    second = SyntheticImages(50, **SMALL).__getitems__(range(50)).fields
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_sample_equals_its_place_in_a_batch() -> None:
    dataset = SyntheticImages(50, **SMALL)
    images, labels = dataset.__getitems__([3, 49, 20]).fields
    for place, index in enumerate([3, 49, 20]):
        assert torch.equal(dataset[index][0], images[place])
        assert dataset[index][1] == labels[place]


def test_labels_cover_the_classes_evenly() -> None:
    labels = SyntheticImages(3000, **SMALL).__getitems__(range(3000)).fields[1]
    counts = torch.bincount(labels)
    assert len(counts) == 3
    assert counts.min() > 900


def test_evaluation_has_other_images_than_training() -> None:
    splits = build(1, num_eval_samples=1, **SMALL)
    assert splits.evaluation is not None
    assert not torch.equal(splits.train[0][0], splits.evaluation[0][0])
