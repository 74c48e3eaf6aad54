"""The sweep prunes trials, and goes on where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import TIMEOUT_SECONDS
from tests.places import ROOT


@pytest.mark.slow
def test_sweep_with_optuna(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna comes with the dev extra")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}

    def sweep(trials: int) -> str:
        words = [sys.executable, str(ROOT / "examples/sweep_optuna.py"), str(trials)]
        ended = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    first = sweep(5)
    assert "Optuna prunes this trial" in first
    second = sweep(1)
    assert len(list((tmp_path / "runs/sweep").glob("trial*/report.html"))) == 6
    best = [float(found) for text in (first, second) for found in re.findall(r"best: .*eval/loss ([\d.]+)", text)]
    assert best[1] <= best[0] < 0.5
