"""Every logged value of a run, as the report reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from framework.report.history import read_history


def test_points_of_any_release_are_read(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "time": 5.0, "epoch": 0.1, "train/loss": 2.0},
        {"step": 2, "time_seconds": 6.0, "metrics": {"train/loss": 1.0, "train/lr": None}},
        {"step": 3, "train/loss": 10**400},
        {"step": 1, "train/loss": 3.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "half a line"
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    history = read_history(tmp_path)
    assert list(history) == ["train/loss", "train/lr"]
    assert history["train/loss"].steps == [1, 2, 3]
    assert history["train/loss"].values[:2] == [3.0, 1.0]
    assert math.isnan(history["train/loss"].values[2])
    assert math.isnan(history["train/lr"].values[0])


def test_a_host_without_the_folder_has_none(tmp_path: Path) -> None:
    assert read_history(tmp_path / "nowhere") == {}
