from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from framework.data.image_sets import build
from framework.data.loaders import TrainLoader
from framework.errors import ConfigError, TrainingError


def add_images(folder: Path, *, count: int = 2, colour: tuple[int, int, int] = (255, 0, 0)) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (40, 30), colour).save(folder / f"{number}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        add_images(tmp_path / part / "cat")
        add_images(tmp_path / part / "dog", colour=(0, 0, 255))
    return tmp_path


def problems(error: ConfigError) -> list[tuple[str, str]]:
    return [(problem.kind, problem.key) for problem in error.problems]


def test_reads_classes_in_alphabetical_order(root: Path) -> None:
    splits = build(str(root), image_size=16)
    assert splits.train.classes == ["cat", "dog"]  # type: ignore[attr-defined]
    assert [splits.train[index][1] for index in range(4)] == [0, 0, 1, 1]
    assert splits.evaluation is not None
    image = splits.evaluation[0][0]
    assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
    red = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    torch.testing.assert_close(image[:, 3, 5], red)


def test_without_augmentation_training_images_are_read_like_evaluation_images(root: Path) -> None:
    stripes = Image.new("RGB", (64, 48))
    stripes.paste((255, 255, 255), (10, 0, 30, 48))
    for part in ("train", "val"):
        stripes.save(root / part / "cat" / "0.png")
    plain, augmented = (build(str(root), image_size=16, augment=augment) for augment in (False, True))
    assert plain.evaluation is not None
    assert torch.equal(plain.train[0][0], plain.evaluation[0][0])
    assert len({augmented.train[0][0].sum().item() for _ in range(8)}) > 1


def test_augmentation_is_the_same_whatever_the_number_of_workers(root: Path) -> None:
    def first_batch(num_workers: int) -> torch.Tensor:
        layout = {"global_size": 4, "micro_size": 4, "accumulation_steps": 1, "rank": 0, "world_size": 1, "seed": 0}
        data = build(str(root), image_size=16).train
        stream = TrainLoader(data, **layout, shuffle=True, random_samples=True, num_workers=num_workers).stream()
        images: torch.Tensor = next(stream)[0]
        stream.close()
        return images

    Image.radial_gradient("L").convert("RGB").save(root / "train" / "cat" / "0.png")
    assert torch.equal(first_batch(0), first_batch(2))


def test_missing_folders_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(str(tmp_path))
    assert problems(caught.value) == [("dataset-not-found", "data.train_dir"), ("dataset-not-found", "data.eval_dir")]
    assert f"put images into {tmp_path}/val/<class>/" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        build(str(tmp_path / "nowhere"))
    assert problems(caught.value) == [("dataset-not-found", "data.root")]


def test_a_folder_without_classes_is_refused(root: Path) -> None:
    (root / "flat").mkdir()
    Image.new("RGB", (4, 4)).save(root / "flat" / "0.png")
    with pytest.raises(ConfigError) as caught:
        build(str(root), train_dir="flat")
    assert problems(caught.value) == [("dataset-no-classes", "data.train_dir")]


def test_different_classes_are_refused_and_named(root: Path) -> None:
    add_images(root / "train" / "bird")
    add_images(root / "val" / "zebra")
    with pytest.raises(ConfigError) as caught:
        build(str(root))
    assert problems(caught.value) == [("dataset-classes-differ", "data.eval_dir")]
    assert "only train has bird, only val has zebra" in str(caught.value)


def test_a_class_without_images_is_refused_and_named(root: Path) -> None:
    for part in ("train", "val"):
        add_images(root / part / "empty", count=0)
    with pytest.raises(ConfigError, match=r"for the classes empty.*\[dataset-no-images\]"):
        build(str(root))


@pytest.mark.parametrize("content", [b"", b"not an image", "half"])
def test_a_damaged_image_is_named_when_it_is_read(root: Path, content: bytes | str) -> None:
    damaged = root / "train" / "cat" / "0.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    splits = build(str(root))
    with pytest.raises(TrainingError, match=r"train/cat/0\.png: cannot be read as an image"):
        splits.train[0]
