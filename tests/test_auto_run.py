"""A run whose ranks choose what its config leaves open: all alike, written down, and kept when it
goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.launched import TIMEOUT_SECONDS
from tests.warm_ranks import WarmRanks

pytestmark = pytest.mark.slow

CONFIG = """
run: {name: open}
model: {kind: lenet}
data: {kind: digits}
zero: {stage: auto}
batch: {global_size: 60, micro_size: auto}
parallel: auto
checkpoint: {resume: auto}
training: {max_steps: 2}
"""


def test_ranks_choose_alike_and_a_resume_keeps_the_choice(warm: WarmRanks, tmp_path: Path) -> None:
    (tmp_path / "open.yaml").write_text(CONFIG, encoding="utf-8")
    sizes = dict.fromkeys(
        ("parallel.expert", "parallel.pipe", "parallel.sequence", "parallel.tensor"), 1
    )
    choice = {"batch.micro_size": 30, "zero.stage": 0, **sizes}
    for steps, words in ((2, "speed unknown"), (3, "as in the checkpoint")):
        arguments = ["--config", "open.yaml", f"training.max_steps={steps}"]
        job = warm.start(arguments, num_ranks=2, folder=tmp_path)
        assert not any(job.wait(TIMEOUT_SECONDS)), job.stated()
        (line,) = [line for line in job.stated().splitlines() if line.startswith("auto: ")]
        assert words in line
        run = tmp_path / "runs/open"
        assert json.loads((run / "plan.json").read_text())["auto"] == choice
        resolved = yaml.safe_load((run / "config.yaml").read_text())
        assert (
            resolved["zero"]["stage"],
            resolved["batch"]["micro_size"],
            resolved["parallel"]["pipe"],
        ) == (0, 30, 1)
