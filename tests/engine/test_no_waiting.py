"""Between two logging points nothing of ours reads a value from the device: not a read more than in
a bare DeepSpeed loop.

Where gradients are clipped (`clip1`) a moving average of the weights is kept as well, and every
step is looked at (`training.bad_steps`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import ROOT, rarely, run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reads(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder: Path = tmp_path_factory.mktemp("reads")
    words = [str(folder / "reads.json"), *(["--all"] if exhaustive else [])]
    run_ranks(ROOT / "tests/jobs/count_syncs.py", *words, num_ranks=1, cwd=folder)
    found: dict[str, dict[str, int]] = json.loads(
        (folder / "reads.json").read_text(encoding="utf-8")
    )
    return found


@pytest.mark.parametrize(
    "case", ["fp32-z{}-clip0", "bf16-z{}-clip1", *rarely(["fp32-z{}-clip1", "bf16-z{}-clip0"])]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_read_more_than_deepspeed_itself(
    reads: dict[str, dict[str, int]], stage: int, case: str
) -> None:
    counted = reads[case.format(stage)]
    assert counted["ours"] == counted["bare"]
    # torch's Adam reads its step counter, a host tensor, once per parameter: the counter counts.
    assert counted["bare"] > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bad_step_is_skipped_on_the_device_or_for_one_read_a_step(
    reads: dict[str, dict[str, int]], stage: int
) -> None:
    fused, other = reads[f"skip-fused-z{stage}"], reads[f"skip-z{stage}"]
    assert fused["ours"] == fused["bare"]
    assert other["ours"] == other["bare"] + 4  # steps
