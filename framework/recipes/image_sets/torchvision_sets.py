"""Fashion-MNIST and CIFAR-10, read (and fetched) by torchvision, held in memory as uint8."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from filelock import FileLock
from torch import Tensor
from torchvision.datasets import CIFAR10, FashionMNIST  # type: ignore[import-untyped]

from framework.data.splits import Splits
from framework.errors import ConfigError, in_one_line
from framework.recipes.image_sets.image_tensors import ImageTensors

_NUM_CLASSES: Final = 10
_SILENT_SERVER_SECONDS: Final = 60.0


@dataclass(frozen=True)
class _Source:
    """A torchvision dataset: its class, its files, and the statistics of its training images in
    [0, 1].
    """

    dataset: Callable[..., Any]
    name: str
    folder: str
    files: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def missing(self, root: Path) -> list[str]:
        """List the files that are missing."""
        return [name for name in self.files if not (root / self.folder / name).is_file()]


_FASHION_MNIST: Final = _Source(
    dataset=FashionMNIST,
    name="FashionMNIST",
    folder="FashionMNIST/raw",
    files=(
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ),
    mean=(0.2860,),
    std=(0.3530,),
)
_CIFAR10: Final = _Source(
    dataset=CIFAR10,
    name="CIFAR10",
    folder="cifar-10-batches-py",
    files=(
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
        "batches.meta",
    ),
    mean=(0.4914, 0.4822, 0.4465),
    # Over all pixels; the 0.2023, 0.1994, 0.2010 that circulate are means over images of each
    # image's own deviation.
    std=(0.2470, 0.2435, 0.2616),
)


def fashion_mnist(root: str = "data", *, download: bool = False, augment: bool = False) -> Splits:
    """Build Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), 60,000 + 10,000 grey images (1, 28, 28),
    labels 0 to 9.

    Arguments are the keys of `config.data.FashionMNIST`. Several processes may start a download at
    once: one fetches, the others wait.

    Raises:
        ConfigError: kinds ``dataset-not-found``, ``dataset-unreadable``,
            ``dataset-download-failed``.
    """
    return _build(_FASHION_MNIST, root=root, download=download, augment=augment)


def cifar10(root: str = "data", *, download: bool = False, augment: bool = True) -> Splits:
    """Build CIFAR-10 (Krizhevsky 2009), 50,000 + 10,000 colour images (3, 32, 32), labels 0 to 9.

    Arguments and errors are as for `fashion_mnist`; the files of ``cifar-10-batches-py`` are
    checked against their MD5 sums.
    """
    return _build(_CIFAR10, root=root, download=download, augment=augment)


def _build(source: _Source, *, root: str, download: bool, augment: bool) -> Splits:
    folder = Path(root).expanduser()
    missing = source.missing(folder)
    if missing and not download:
        raise ConfigError.of(
            "dataset-not-found",
            f"{source.name} needs {', '.join(missing)} in {folder / source.folder}",
            f"set data.download: true or put torchvision's {source.folder} under {root}",
            "data.root",
            root,
        )
    if missing:
        _download(source, folder, root=root)
    return Splits(
        train=_load(source, folder, root=root, train=True, augment=augment),
        evaluation=_load(source, folder, root=root, train=False, augment=False),
    )


def _load(source: _Source, folder: Path, *, root: str, train: bool, augment: bool) -> ImageTensors:
    try:
        images, labels = _tensors(source.dataset(str(folder), train=train))
        return ImageTensors(images, labels, mean=source.mean, std=source.std, augment=augment)
    # A damaged file raises any of a dozen types, AssertionError among them.
    except Exception as error:
        part = "training" if train else "test"
        raise ConfigError.of(
            "dataset-unreadable",
            f"the {part} files in {folder / source.folder} cannot be "
            f"read as {source.name} ({_describe(error)})",
            "delete that folder and set data.download: true, or copy the files there again",
            "data.root",
            root,
        ) from error


def _tensors(dataset: Any) -> tuple[Tensor, Tensor]:
    """Return images (N, C, H, W) uint8 and labels (N,) int64 of one of torchvision's datasets.

    Raises:
        ValueError: torchvision has read no images, other labels than images, or labels out of
            range, which it does not check.
    """
    images = torch.as_tensor(dataset.data)
    labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
    if len(images) != len(labels) or len(images) == 0:
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    if labels.min() < 0 or labels.max() >= _NUM_CLASSES:
        raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    if images.ndim == 3:
        return images[:, None], labels
    return images.permute(0, 3, 1, 2).contiguous(), labels


def _download(source: _Source, folder: Path, *, root: str) -> None:
    """Fetch into a folder aside and move finished files over, one process at a time. A folder aside
    that exists when the lock is taken is left over from a process that was killed.
    """
    aside = folder / f".{source.name}.partial"
    try:
        with _locking(folder, f".{source.name}.lock"):
            if not source.missing(folder):
                return
            shutil.rmtree(aside, ignore_errors=True)
            # torchvision sets no timeout for a silent connection, and a firewall may just drop
            # packets.
            before = socket.getdefaulttimeout()
            socket.setdefaulttimeout(_SILENT_SERVER_SECONDS)
            try:
                source.dataset(str(aside), train=True, download=True)
                (folder / source.folder).mkdir(parents=True, exist_ok=True)
                for name in source.files:
                    os.replace(aside / source.folder / name, folder / source.folder / name)
            finally:
                socket.setdefaulttimeout(before)
                shutil.rmtree(aside, ignore_errors=True)
    # No network, a full disk, a wrong checksum: each raises another type.
    except Exception as error:
        raise ConfigError.of(
            "dataset-download-failed",
            f"{source.name} could not be fetched ({_describe(error)})",
            f"put torchvision's {source.folder} under {root} from a machine with a network, or "
            "try again",
            "data.root",
            root,
        ) from error


@contextmanager
def _locking(folder: Path, lock_name: str) -> Iterator[None]:
    """Wait for the lock in a folder, without limit, and hold it in the block. A failure removes the
    lock and the folders made for it.
    """
    lock = FileLock(folder / lock_name)
    made_folders: list[Path] = []
    while not lock.is_locked:
        for place in (folder, *folder.parents):  # the innermost first
            if not place.exists():
                made_folders.append(place)
        folder.mkdir(parents=True, exist_ok=True)
        # The process that this one waited for may have failed and removed the folder.
        with suppress(FileNotFoundError):
            lock.acquire()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            # A waiting process finds its lock file removed, and makes another one.
            (folder / lock_name).unlink()
            for place in made_folders:
                place.rmdir()  # unless it holds something
        raise
    finally:
        lock.release()


def _describe(error: Exception) -> str:
    """Describe an error by type and text, without torchvision's advice to pass an argument that our
    users do not write.
    """
    text = in_one_line(error, longest=10_000)
    return text.removesuffix("You can use download=True to download it").strip()
