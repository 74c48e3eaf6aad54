"""The fault enumerator on DeepSpeed's own save: whichever call ends the process or fails, a
checkpoint to go on from is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import ROOT, rarely, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [1, *rarely([0, 3])])  # which write through the same calls
def test_every_call_of_a_real_save_may_go_wrong(
    stage: int, tmp_path: Path, exhaustive: bool
) -> None:
    kinds = ["end-before", "ENOSPC", *(["EIO", "end-after", "short"] if exhaustive else [])]
    script = ROOT / "tests/jobs/real_save_faults.py"
    stated = run_ranks(
        script, str(tmp_path / "faults"), str(stage), *kinds, num_ranks=1, cwd=tmp_path
    )
    reported = json.loads(stated.splitlines()[-1])
    assert len(reported["calls"]) > 80
    assert set(reported["calls"]) >= {
        "open",
        "write",
        "fsync",
        "rename",
        "replace",
        "unlink",
        "rmdir",
        "mkdir",
    }
    for kind in kinds:
        outcomes = reported["outcomes"][kind]
        assert len(outcomes) == len(reported["calls"])
        assert {reached for _, reached in outcomes} <= {20, 30}
        assert all(reached == 30 for written, reached in outcomes if written), (
            "what was reported as saved is there"
        )
        if kind != "short":  # a write that is cut short is gone on with
            assert outcomes[reported["calls"].index("open")] == [False, 20]
            assert sum(not written for written, _ in outcomes) > 80
