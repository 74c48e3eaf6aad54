"""Columns of a strategy: which components of time and memory are in each."""

from __future__ import annotations

import pytest

from framework.commands.strategies import _TIME_GROUPS, MEMORY_GROUPS, grouped
from framework.load_run import load_run
from framework.plan.auto import listed_target
from framework.plan.candidate import judge
from framework.plan.cluster import Cluster
from tests.places import ROOT


@pytest.mark.parametrize("name", ["gpt_fp8", "gpt_muon", "gpt_bf16_states"])
def test_traffic_of_one_device_is_copies_of_gradients_alone(name: str) -> None:
    plan = load_run(str(ROOT / f"ds_configs/{name}.yaml")).plan(Cluster(1, 1, device="cuda"))
    time = judge(plan, listed_target("h200-141gb", devices_per_host=1)).time
    assert time is not None
    sums = grouped(time.seconds, _TIME_GROUPS, "traffic")
    assert sums["compute"] > 0
    assert sums["traffic"] == time.seconds["copies"]


def test_moments_of_zenflows_columns_are_the_optimizers() -> None:
    run = load_run(str(ROOT / "ds_configs/gpt_zenflow.yaml"))
    memory = judge(run.plan(Cluster(1, 2, device="cuda"))).memory
    components = dict(memory.moments["between"])
    assert components["moments of columns"] > 0
    without = {name: size for name, size in components.items() if name != "moments of columns"}
    with_columns = grouped(components, MEMORY_GROUPS, "buffers")
    others = grouped(without, MEMORY_GROUPS, "buffers")
    assert with_columns["optimizer"] - others["optimizer"] == components["moments of columns"]
    assert with_columns["buffers"] == others["buffers"]
