"""Experts chosen by the data train as in plain PyTorch at stages 0 to 3, or are refused; 10 steps
on two ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import run_ranks, series, train_cases
from tests.places import ROOT

pytestmark = pytest.mark.slow
JOB = ROOT / "tests/jobs/routed_models.py"


def test_weights_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    run_ranks(JOB, "out.json", num_ranks=2, cwd=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert 0 < found.pop("most gradients waiting") < 12, (
        "a layer that leads nowhere holds the others up"
    )
    assert len(found) == 17
    assert {name: difference for name, difference in found.items() if not difference < 1e-6} == {}


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (
            "routed",
            ["rank 0 calls block.experts.0.weight where rank 1 calls block.experts.2.weight"] * 2,
        ),
        (
            "late",
            [
                f"rank {rank} calls block.experts.{expert}.weight where the first step called"
                for rank, expert in ((0, 1), (1, 3))
            ],
        ),
    ],
)
def test_at_stage_3_it_is_refused_at_the_step_where_it_is_first_seen(
    kind: str, texts: list[str], tmp_path: Path
) -> None:
    run_ranks(JOB, "out.json", kind, num_ranks=2, cwd=tmp_path)
    for rank, text in enumerate(texts):
        refusal = (tmp_path / f"out.{rank}").read_text(encoding="utf-8")
        assert text in refusal
        assert refusal.endswith("[graph-differs-between-ranks]")


def test_runs_of_the_framework_agree_at_all_stages(tmp_path: Path) -> None:
    """Held against stage 0, which the first test holds against plain PyTorch."""
    leaf = {"deepspeed": {"zero_optimization": {"leaf_module": {"names": ["block"]}}}}
    configs = [
        {
            "run": {"name": f"stage{stage}", "output_dir": str(tmp_path)},
            "model": {"target": "tests.jobs.routed_models:Routed"},
            "data": {"target": "tests.jobs.routed_models:routed_samples"},
            "task": {"target": "tests.jobs.routed_models:squared"},
            "batch": {"global_size": 16, "micro_size": 4},
            "training": {"max_steps": 8, "log_every": 1},
            "zero": {"stage": stage},
            "checkpoint": {"every_steps": 100},
        }
        | (leaf if stage == 3 else {})
        for stage in (0, 1, 2, 3)
    ]
    train_cases(configs, num_ranks=2, folder=tmp_path)
    expected = series(tmp_path / "stage0", "train/loss")
    assert len(expected) == 8
    for stage in (1, 2, 3):
        assert series(tmp_path / f"stage{stage}", "train/loss") == pytest.approx(expected, abs=2e-6)
