from __future__ import annotations

from pathlib import Path

import pytest

from tests.places import data_root


@pytest.fixture(scope="session")
def fashion_root() -> Path:
    """Folder of a real Fashion-MNIST subset in torchvision's layout: 2,048 training and 509 test
    images.
    """
    root = data_root()
    if not (root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.skip(f"no FashionMNIST/raw in {root}; set DSF_TEST_DATA to a folder that has it")
    return root


@pytest.fixture(scope="session")
def tiny_shakespeare() -> Path:
    """A megabyte of Shakespeare's plays, as a character-level model is tried on."""
    path = data_root() / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        pytest.skip(f"no {path}; set DSF_TEST_DATA to a folder that has it")
    return path
