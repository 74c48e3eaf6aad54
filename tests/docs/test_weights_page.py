"""The program of docs/weights.md is trained as it stands there: what it reads, changes and clips."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import framework
from tests.launched import ROOT, read_metrics, run_ranks


@pytest.mark.slow
def test_what_the_page_reads_changes_and_clips_is_so(tmp_path: Path) -> None:
    page = (ROOT / "docs/weights.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == len(re.findall(r"^## .* a (?:weight|gradient)$", page, re.MULTILINE))
    code = "\n\n".join(blocks)
    # the weights before the reset and behind it are compared with those of the end
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    run_ranks(tmp_path / "example.py", num_ranks=2, cwd=tmp_path)
    weights = framework.load(tmp_path / "runs/run").state_dict()
    rows = [row for row in read_metrics(tmp_path / "runs/run") if "mine/head_norm" in row]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert float(weights["fc3.weight"].norm()) == pytest.approx(rows[-1]["mine/head_norm"])
    assert float(weights["fc3.weight"].abs().max()) == pytest.approx(0.05)
    # ten steps of Adam at this rate move a number by about 0.01 at most
    assert 0 < float(weights["fc3.bias"].abs().max()) < 0.011
