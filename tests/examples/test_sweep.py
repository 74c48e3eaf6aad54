"""The sweep prunes trials, and goes on where it was, in another process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launched import run_ranks
from tests.places import ROOT


@pytest.mark.slow
def test_sweep_with_optuna(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna comes with the dev extra")
    first, second = (
        run_ranks(ROOT / "examples/sweep_optuna.py", str(trials), num_ranks=1, cwd=tmp_path)
        for trials in (5, 1)
    )
    assert "Optuna prunes this trial" in first
    assert len(list((tmp_path / "runs/sweep").glob("trial*/report.html"))) == 6
    best = [
        float(found)
        for text in (first, second)
        for found in re.findall(r"best: .*eval/loss ([\d.]+)", text)
    ]
    assert best[1] <= best[0] < 0.5
