"""Gradients of ZeRO 1 and 2 over NCCL, where each rank gets its share of the sum alone, beside
DeepSpeed's buckets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.launched import torchrun
from tests.places import ROOT

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        NUM_DEVICES < 2, reason="fewer than two CUDA devices: sums over NCCL not run"
    ),
]


def test_shares_are_equal_to_the_bit_to_those_of_deepspeeds_buckets(tmp_path: Path) -> None:
    job = ROOT / "tests/jobs/flat_shares.py"
    out = tmp_path / "found.json"
    done = torchrun(job, str(out), num_ranks=2, cwd=tmp_path, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stderr[-4000:]
    for report in json.loads(out.read_text(encoding="utf-8")):
        for name, sides in report.items():
            side = "stage 1" if "stage 1" in sides else "deepspeed"
            assert sides[side]["distance"] == 0, name
