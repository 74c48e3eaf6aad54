"""Weights that are frozen in some steps of a run are trained in the others as a plain loop trains
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import run_ranks
from tests.places import ROOT

pytestmark = pytest.mark.slow


def test_runs_are_those_of_a_plain_loop_and_go_on_to_the_bit(tmp_path: Path) -> None:
    printed = run_ranks(ROOT / "tests/jobs/frozen_steps.py", "out.json", num_ranks=2, cwd=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert "from step 5 on 2 weights trained: 2.weight and 1 more" in printed
    assert "from step 8 on 2 weights frozen: 4.weight and 1 more" in printed
    joined = found.pop("joined")
    assert joined.startswith(
        "training.freeze.1: the optimizer makes parameter groups of its own"
    ), joined
    assert joined.endswith("[freeze-needs-groups]")
    limits = {
        name: 0.0 if " resumed " in name else 2e-3 if name.endswith("half") else 1e-6
        for name in found
    }
    assert len(found) == 4 * 5 + 4 + 4 + 3 + 1
    assert {name: value for name, value in found.items() if not value <= limits[name]} == {}
