"""The fault enumerator on DeepSpeed's own save: whichever call ends the process or fails, a checkpoint to go on from is
there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import ROOT, job_environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [1, 0, 3])
def test_every_call_of_a_real_save_may_go_wrong(stage: int, tmp_path: Path, exhaustive: bool) -> None:
    if stage != 1 and not exhaustive:
        pytest.skip("the other stages write through the same calls; --exhaustive enumerates them too")
    kinds = ["end-before", "EIO", "ENOSPC", *(["end-after", "short"] if exhaustive else [])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.jobs.real_save_faults", str(tmp_path), str(stage), *kinds],
        cwd=ROOT,
        env=job_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert len(reported["calls"]) > 80
    assert set(reported["calls"]) >= {"open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"}
    for kind in kinds:
        outcomes = reported["outcomes"][kind]
        assert len(outcomes) == len(reported["calls"])
        assert {reached for _, reached in outcomes} <= {20, 30}
        assert all(reached == 30 for written, reached in outcomes if written), "what was reported as saved is there"
        if kind != "short":  # a write that is cut short is gone on with
            assert outcomes[reported["calls"].index("open")] == [False, 20]
            assert sum(not written for written, _ in outcomes) > 80
