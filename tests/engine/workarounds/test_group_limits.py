"""Every group of a run waits as long as the group of all ranks does, and not as long as torch
would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launched import ROOT, run_ranks

ZERO, PIPELINE = {"zero": {"stage": 2}}, {"parallel": {"pipe": 2}, "checkpoint": {"at_end": False}}


def limits(folder: Path, *words: Any) -> list[float]:
    given = [word if isinstance(word, str) else json.dumps(word) for word in words]
    run_ranks(ROOT / "tests/jobs/group_limits.py", str(folder), *given, num_ranks=2, cwd=folder)
    return [
        limit
        for rank in range(2)
        for limit in json.loads((folder / f"limits{rank}.json").read_text(encoding="utf-8"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("config", [ZERO, PIPELINE], ids=["zero", "pipeline"])
def test_all_groups_have_the_limit_of_the_first(config: Any, tmp_path: Path) -> None:
    found = limits(tmp_path, config)
    assert len(found) >= 8, "DeepSpeed's own are there, and those of a layout"
    assert set(found) == {600.0}, "DEEPSPEED_TIMEOUT's default; torch's for gloo is 1800 s"


@pytest.mark.slow
def test_deepspeed_s_own_groups_have_none(tmp_path: Path) -> None:
    """Fails where DeepSpeed gives them its limit: then the workaround goes."""
    assert set(limits(tmp_path, "unlimited", ZERO)) == {600.0, 1800.0}
