from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.places import ROOT


@pytest.fixture(scope="session")
def fashion_root() -> Path:
    """Folder of a real Fashion-MNIST subset in torchvision's layout: 2,048 training and 509 test
    images.
    """
    beside_the_repository = ROOT.parent / "shared" / "data"
    root = Path(os.environ.get("DSF_TEST_DATA", beside_the_repository))
    if not (root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.skip(f"no FashionMNIST/raw in {root}; set DSF_TEST_DATA to a folder that has it")
    return root


@pytest.fixture(scope="session")
def tiny_shakespeare() -> Path:
    """A megabyte of Shakespeare's plays, as a character-level model is tried on."""
    beside_the_repository = ROOT.parent / "shared" / "data"
    root = Path(os.environ.get("DSF_TEST_DATA", beside_the_repository))
    path = root / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        pytest.skip(
            f"no tinyshakespeare/input.txt in {root}; set DSF_TEST_DATA to a folder that has it"
        )
    return path
