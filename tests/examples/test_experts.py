"""A small Mixtral over two ranks: the losses of the run on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import run_ranks, series
from tests.places import ROOT

pytestmark = pytest.mark.slow


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = []
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        place.mkdir()
        run_ranks(ROOT / "examples/experts.py", "3", num_ranks=ranks, cwd=place)
        assert series(place / "runs/experts", "train/balance_loss")[1] == pytest.approx(
            1.0, abs=0.1
        )
        losses.append(series(place / "runs/experts", "train/loss"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
