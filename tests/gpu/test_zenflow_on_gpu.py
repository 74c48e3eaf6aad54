"""ZenFlow on a CUDA device, with the host's step across the bus, loses as on processors, where it
is held against its definition.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.test_zenflow import HELD
from tests.launched import series, train_cases, train_cases_on_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: columns apart from the host's step not run",
    ),
]


def test_losses_are_those_of_processors(tmp_path: Path) -> None:
    folders = (tmp_path / "cpu", tmp_path / "cuda")
    for folder in folders:
        folder.mkdir()
    train_cases([case.config(folders[0]) for case in HELD], num_ranks=1, folder=folders[0])
    train_cases_on_gpu([case.config(folders[1]) for case in HELD], folder=folders[1])
    for case in HELD:
        expected, found = (series(folder / case.name, "train/loss") for folder in folders)
        assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-3), case.name
