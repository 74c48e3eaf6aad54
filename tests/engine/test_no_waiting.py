"""Between two logging points a step reads a value from the device only where it may be left out; at
stage 3, which DeepSpeed steps by itself, not one more than in a bare DeepSpeed loop.

Where gradients are clipped (`clip1`) a moving average of the weights is kept as well, and every
step is looked at (`training.bad_steps`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import ROOT, rarely, run_ranks

pytestmark = pytest.mark.slow

STEPS = 4  # that are counted


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
def test_no_read_more_than_has_to_be(
    reads: dict[str, dict[str, int]], stage: int, case: str
) -> None:
    counted = reads[case.format(stage)]
    # torch's Adam reads the step counter of each tensor that it steps, which is on the host
    counters = 10 if stage == 0 else 1
    # DeepSpeed looks for infinity at stages 1 and 2
    may_be_left_out = stage > 0 and case.startswith("fp32")
    expected = STEPS * (counters + may_be_left_out)
    if stage == 3:
        expected = counted["bare"]
    assert counted["ours"] == expected
    assert counted["bare"] >= expected > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bad_step_is_skipped_on_the_device_or_for_one_read_a_step(
    reads: dict[str, dict[str, int]], stage: int
) -> None:
    fused, other = reads[f"skip-fused-z{stage}"], reads[f"skip-z{stage}"]
    usual = reads[f"fp32-z{stage}-clip0"]
    if stage == 3:
        usual = {"ours": other["bare"]}
        assert fused["ours"] == fused["bare"]
    elif stage == 0:
        assert fused["ours"] == 0
    else:
        assert fused["ours"] == STEPS
    assert other["ours"] == usual["ours"] + STEPS
