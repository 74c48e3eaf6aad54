from __future__ import annotations

import gzip
import hashlib
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, FashionMNIST

from framework.data.splits import Splits
from framework.errors import ConfigError, show_value
from framework.recipes.image_sets.image_tensors import ImageTensors
from framework.recipes.image_sets.torchvision_sets import cifar10, fashion_mnist

RAW = Path("FashionMNIST") / "raw"
FILES = [
    f"{part}-ubyte"
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
]


def only_problem(error: ConfigError) -> str:
    (problem,) = error.problems
    return str(problem)


def images_of(splits: Splits) -> tuple[ImageTensors, ImageTensors]:
    assert isinstance(splits.train, ImageTensors)
    assert isinstance(splits.evaluation, ImageTensors)
    return splits.train, splits.evaluation


@pytest.fixture
def copied_root(fashion_root: Path, tmp_path: Path) -> Path:
    """A copy of the subset, to be damaged."""
    shutil.copytree(fashion_root / RAW, tmp_path / RAW)
    return tmp_path


@pytest.fixture
def requests(
    fashion_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """A mirror on this machine that serves the subset; yields the paths asked for (GET)."""
    served, asked = tmp_path / "mirror", []
    served.mkdir()
    for name in FILES:
        (served / f"{name}.gz").write_bytes(
            gzip.compress((fashion_root / RAW / name).read_bytes(), compresslevel=1)
        )
    sums = [
        (f"{name}.gz", hashlib.md5((served / f"{name}.gz").read_bytes()).hexdigest())
        for name in FILES
    ]

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # torchvision hangs up on its first request

    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(served)))
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    monkeypatch.setattr(FashionMNIST, "resources", sums)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield asked
    server.shutdown()
    server.server_close()
    thread.join(60)


def test_reads_real_fashion_mnist(fashion_root: Path) -> None:
    train, evaluation = images_of(fashion_mnist(str(fashion_root)))
    assert train.images.shape[1:] == (1, 28, 28)
    assert set(train.labels.tolist()) == set(range(10))
    assert len(evaluation) < len(train)
    pixels = train.__getitems__(range(len(train))).fields[0]
    # The constants are those of all 60,000 images; the test data may be a part of them.
    assert pixels.mean().item() == pytest.approx(0, abs=0.03)
    assert pixels.std().item() == pytest.approx(1, abs=0.03)


def test_only_training_images_are_augmented(fashion_root: Path) -> None:
    train, evaluation = images_of(fashion_mnist(str(fashion_root), augment=True))
    assert (train.augment, evaluation.augment) == (True, False)


def test_a_missing_dataset_names_the_files_and_both_ways_out(tmp_path: Path) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    (tmp_path / RAW / "train-images-idx3-ubyte").touch()
    with pytest.raises(ConfigError) as caught:
        fashion_mnist(str(tmp_path))
    assert only_problem(caught.value) == (
        f"data.root = {show_value(str(tmp_path))}: FashionMNIST needs train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
        f"t10k-labels-idx1-ubyte in {tmp_path / RAW}; set data.download: true or put torchvision's FashionMNIST/raw "
        f"under {tmp_path} [dataset-not-found]"
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 3, 500])
def test_a_truncated_file_is_a_config_error(copied_root: Path, name: str, size: int) -> None:
    damaged = copied_root / RAW / name
    damaged.write_bytes(damaged.read_bytes()[:size])
    with pytest.raises(ConfigError) as caught:
        fashion_mnist(str(copied_root))
    text = only_problem(caught.value)
    assert (
        f"the {'training' if name.startswith('train') else 'test'} files in {copied_root / RAW}"
        in text
    )
    assert text.endswith("[dataset-unreadable]")
    assert "\n" not in text


def test_labels_that_no_class_has_are_a_config_error(copied_root: Path) -> None:
    damaged = copied_root / RAW / "train-labels-idx1-ubyte"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ConfigError, match="labels from 0 to 255"):
        fashion_mnist(str(copied_root))


def test_images_and_labels_of_different_number_are_a_config_error(copied_root: Path) -> None:
    shutil.copy(
        copied_root / RAW / "t10k-labels-idx1-ubyte", copied_root / RAW / "train-labels-idx1-ubyte"
    )
    with pytest.raises(ConfigError, match=r"\d+ images and \d+ labels"):
        fashion_mnist(str(copied_root))


def test_an_unreachable_server_is_a_config_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(ConfigError) as caught:
        fashion_mnist(str(tmp_path), download=True)
    text = only_problem(caught.value)
    assert "could not be fetched" in text
    assert "refused" in text
    assert text.endswith("[dataset-download-failed]")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there_before", ["", "data", "data/deep"])
def test_folders_that_a_failed_download_has_made_are_removed(
    there_before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])
    (tmp_path / there_before).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))

    def ask(_: int) -> str:
        with pytest.raises(ConfigError) as caught:
            fashion_mnist(str(tmp_path / "data/deep/er"), download=True)
        return only_problem(caught.value)

    assert "refused" in ask(1)
    assert sorted(tmp_path.rglob("*")) == before
    # they remove folders under each other's feet, and may leave one that is empty
    with ThreadPoolExecutor(4) as pool:
        assert all("dataset-download-failed" in reported for reported in pool.map(ask, range(4)))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_root_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="dataset-download-failed"):
        fashion_mnist(str(tmp_path / "file" / "data"), download=True)


def test_processes_that_ask_at_once_fetch_once(
    fashion_root: Path, tmp_path: Path, requests: list[str]
) -> None:
    root = tmp_path / "data"
    killed = root / ".FashionMNIST.partial" / RAW / "train-images-idx3-ubyte.gz"
    killed.parent.mkdir(parents=True)
    killed.write_bytes(b"half a file that a killed process left")
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: fashion_mnist(str(root), download=True), range(3)))
    # torchvision asks twice for every file: first to follow redirects, hanging up on the body, then
    # to read it.
    assert Counter(requests) == {f"/{name}.gz": 2 for name in FILES}
    expected = images_of(fashion_mnist(str(fashion_root)))[0]
    for splits in results:
        assert torch.equal(images_of(splits)[0].images, expected.images)
    assert sorted(path.name for path in (root / RAW).iterdir()) == sorted(FILES)
    assert {path.name for path in root.iterdir()} <= {"FashionMNIST", ".FashionMNIST.lock"}


def test_a_download_with_a_wrong_checksum_is_refused(
    tmp_path: Path, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FashionMNIST, "resources", [(f"{name}.gz", "0" * 32) for name in FILES])
    with pytest.raises(ConfigError, match="dataset-download-failed"):
        fashion_mnist(str(tmp_path / "data"), download=True)
    assert requests
    assert not (tmp_path / "data" / "FashionMNIST").exists()


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten images per file in CIFAR-10's format, with torchvision's checksums replaced by theirs."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name: str, content: object) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def part(number: int) -> dict[str, object]:
        red_first = np.full((10, 3 * 32 * 32), number, dtype=np.uint8)
        red_first[:, :1024] = 200
        red_first[:, 1] = 7  # second pixel of the first row, red
        return {"data": red_first, "labels": list(range(10))}

    names = [f"data_batch_{number}" for number in range(1, 6)]
    monkeypatch.setattr(
        CIFAR10, "train_list", [[name, write(name, part(n))] for n, name in enumerate(names)]
    )
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", write("test_batch", part(9))]])
    meta = {"label_names": [str(number) for number in range(10)]}
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": write("batches.meta", meta)})
    return tmp_path


def test_reads_cifar10_with_channels_first(cifar_root: Path) -> None:
    train, evaluation = images_of(cifar10(str(cifar_root)))
    assert train.images.shape == (50, 3, 32, 32)
    assert evaluation.images.shape == (10, 3, 32, 32)
    assert train.images[:, 0, 0, 1].tolist() == [7] * 50
    assert train.images[10, :, 5, 5].tolist() == [200, 1, 1]
    assert train.labels.tolist() == list(range(10)) * 5
    assert (train.augment, evaluation.augment) == (True, False)


def test_a_damaged_cifar10_file_is_a_config_error(cifar_root: Path) -> None:
    damaged = cifar_root / "cifar-10-batches-py" / "data_batch_3"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ConfigError) as caught:
        cifar10(str(cifar_root))
    text = only_problem(caught.value)
    assert "cannot be read as CIFAR10 (RuntimeError: Dataset not found or corrupted.)" in text
    assert text.endswith("[dataset-unreadable]")


def test_a_missing_cifar10_names_its_files(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"CIFAR10 needs data_batch_1, .*, test_batch, batches.meta in"
    ):
        cifar10(str(tmp_path))
