from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

from framework.errors import ConfigError, TrainingError
from framework.recipes.image_sets.image_folder import build
from tests.data.loader_of import train_loader
from tests.ranks_of_host import on_ranks


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
    plain, augmented = (
        build(str(root), image_size=16, augment=augment) for augment in (False, True)
    )
    assert plain.evaluation is not None
    assert torch.equal(plain.train[0][0], plain.evaluation[0][0])
    assert len({augmented.train[0][0].sum().item() for _ in range(8)}) > 1


def test_augmentation_is_the_same_for_any_number_of_workers(root: Path) -> None:
    def first_batch(num_workers: int) -> torch.Tensor:
        layout = {
            "global_size": 4,
            "micro_size": 4,
            "accumulation_steps": 1,
            "rank": 0,
            "world_size": 1,
            "seed": 0,
        }
        data = build(str(root), image_size=16).train
        stream = train_loader(
            data, **layout, shuffle=True, random_samples=True, num_workers=num_workers
        ).stream()
        images: torch.Tensor = next(stream)[0]
        stream.close()
        return images

    Image.radial_gradient("L").convert("RGB").save(root / "train" / "cat" / "0.png")
    assert torch.equal(first_batch(0), first_batch(2))


def test_missing_folders_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(str(tmp_path))
    assert problems(caught.value) == [
        ("dataset-not-found", "data.train_dir"),
        ("dataset-not-found", "data.eval_dir"),
    ]
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


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    """Classes with whatever a folder may hold."""
    add_images(tmp_path / "elsewhere" / "deep")
    for part in ("train", "val"):
        cat = root / part / "cat"
        add_images(cat / "b" / "a", count=1)
        shutil.copy(cat / "0.png", os.fsencode(cat) + b"/\xff odd\nname.PNG")
        for name in ("LOUD.JPEG", "caf\u00e9.webp", "b.png"):
            shutil.copy(cat / "0.png", cat / name)
        for name in (".hidden", "notes.txt", "png", "../beside.png"):
            (cat / name).write_bytes(b"")
        (root / part / "linked").symlink_to(tmp_path / "elsewhere")
        (cat / "a folder").symlink_to(tmp_path / "elsewhere" / "deep")
        (cat / "linked.png").symlink_to(cat / "0.png")
        (cat / "broken.png").symlink_to(tmp_path / "nowhere")
    return root


@pytest.mark.parametrize("by", ["its path", "a relative path", "."])
def test_samples_are_those_of_torchvision(
    tree: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree / "train" if by == "." else tree.parent)
    name = {"its path": str(tree), "a relative path": tree.name, ".": "."}[by]
    parts = {"train_dir": ".", "eval_dir": "."} if by == "." else {}
    train: Any = build(name, augment=False, **parts).train
    expected = ImageFolder("." if by == "." else f"{name}/train", transform=train.transform)
    for field in ("classes", "class_to_idx", "targets", "root", "extensions", "transform"):
        assert getattr(train, field) == getattr(expected, field), field
    assert len(expected) == 15
    assert isinstance(train, ImageFolder)
    assert list(train.samples) == list(train.imgs) == expected.samples
    assert train.samples[2:9:3] == expected.samples[2:9:3]
    assert train.samples[-1] == expected.samples[-1]
    assert {type(each) for sample in train.samples for each in sample} == {str, int}
    with pytest.raises(IndexError):
        train.samples[15]
    assert torch.equal(train[3][0], expected[3][0])
    assert train[13][1] == expected[13][1] == 2
    assert list(pickle.loads(pickle.dumps(train.samples))) == expected.samples


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, OSError)) as caught:
        call()
    return " ".join(str(caught.value).split())


def test_empty_classes_are_reported_in_the_words_of_torchvision(root: Path) -> None:
    for name in ("void", "bare", "cat 2"):
        for part in ("train", "val"):
            (root / part / name).mkdir()
    stated = refused(lambda: ImageFolder(str(root / "train")))
    assert "for the classes bare, cat 2, void. Supported" in stated
    assert refused(lambda: build(str(root))) == (
        f"data.root = {root}: {root}/train: {stated}; put images into {root}/train/<class>/ [dataset-no-images]"
    )


@pytest.mark.parametrize("unreadable", ["train/cat/b", "train/cat", "train"])
def test_folders_that_cannot_be_read_are_taken_as_torchvision_takes_them(
    root: Path, unreadable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_images(root / "train/cat/b")
    scan = os.scandir

    def refusing(path: Any = ".") -> Any:
        if str(path) == str(root / unreadable):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    if unreadable == "train/cat/b":  # passed over in silence
        train: Any = build(str(root)).train
        assert list(train.samples) == ImageFolder(str(root / "train")).samples
        assert len(train.samples) == 4
    else:
        assert refused(lambda: ImageFolder(str(root / "train"))) in refused(
            lambda: build(str(root))
        )


@pytest.mark.parametrize("outcome", ["samples", "error"])
def test_one_rank_of_a_host_lists_for_all(
    tree: Path, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if outcome == "error":
        for part in ("train", "val"):
            (tree / part / "empty").mkdir()
    scan, scanned, held = os.scandir, list[str](), list[Any]()

    def counting(path: Any = ".") -> Iterator[Any]:
        scanned.append(str(path))
        return scan(path)

    def listed() -> tuple[Any, int]:
        scanned.clear()
        try:
            held.append(build(str(tree)).train)
            found: Any = list(held[-1].samples)
        except ConfigError as error:
            found = str(error)
        return found, len([path for path in scanned if path.startswith(str(tree))])

    monkeypatch.setattr(os, "scandir", counting)
    expected, num_scans = listed()
    assert num_scans > 5
    found = on_ranks(listed, num_ranks=3)
    assert sorted(found, key=lambda each: each[1]) == [
        (expected, 0),
        (expected, 0),
        (expected, num_scans),
    ]
