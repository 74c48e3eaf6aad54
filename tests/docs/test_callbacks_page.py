"""The example of docs/callbacks.md is trained as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launched import ROOT, read_metrics, run_ranks


@pytest.mark.slow
def test_the_example_trains_and_its_callback_is_heard(tmp_path: Path) -> None:
    page = (ROOT / "docs/callbacks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    # others are parts of a program
    (code,) = [block for block in blocks if "framework.fit(" in block]
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    stated = run_ranks(tmp_path / "example.py", num_ranks=2, cwd=tmp_path)
    rows = read_metrics(tmp_path / "runs/run")
    logged = [row for row in rows if "train/loss" in row]
    assert [row["mine/loss_per_epoch"] for row in logged] == [
        pytest.approx(row["train/loss"] / max(row["epoch"], 1)) for row in logged
    ]
    assert logged[-1]["step"] == 100 or "the loss is small enough" in stated
