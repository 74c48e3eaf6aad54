"""The arithmetic of benchmarks/resnet50_parallel.py, and that every case of it is a run config that works."""

from __future__ import annotations

import pytest

from benchmarks.records import ROOT, spread
from benchmarks.resnet50_parallel import CASES, GLOBAL_SIZE, SETTINGS, Case, step_seconds, summary
from framework.config.load import load_with_source
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_takes_the_same_global_batch(case: Case) -> None:
    words = [*SETTINGS, *case.settings()]
    config, source = load_with_source(str(ROOT / "ds_configs/resnet50_synthetic.yaml"), words)
    plan = make_plan(config, Cluster(devices_per_host=case.num_ranks, device="cpu"), source=source)
    assert plan.layout.global_size == GLOBAL_SIZE
    assert plan.layout.accumulation_steps == case.micro_batches


def test_the_first_step_is_left_out() -> None:
    rows = [{"step": 1, "time/step_ms": 900.0}, {"step": 2, "time/step_ms": 500.0}, {"step": 2, "eval/loss": 1.0}]
    assert step_seconds(rows) == [0.5]


def test_a_summary_holds_every_repeat() -> None:
    runs = [{"step_seconds": seconds, "load_average": 1.0} for seconds in (2.0, 1.0, 4.0)]
    found = summary(CASES[0], runs, single_device_seconds=4.0)
    assert found["step_seconds"] == spread([1.0, 2.0, 4.0]) == {"median": 2.0, "fastest": 1.0, "slowest": 4.0}
    assert found["speed_up"] == 2.0
    assert len(found["repeats"]) == 3
