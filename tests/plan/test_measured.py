"""Measured rates: where they are kept, for whom, and what a machine makes of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from framework.config.load import config_from_values
from framework.plan.auto import conditions, measured_target, peaks_at_hand, resolve, target_at_hand
from framework.plan.cluster import Cluster
from framework.plan.devices import Machine
from framework.plan.measured import keep, measured_rates, path_of

STAGE_3 = {
    "seconds": 9e-3,
    "seconds_per_weight": 1e-3,
    "seconds_per_weight_again": 5e-4,
    "seconds_per_gathered_weight": 1e-2,
}
RATES = {
    "flops_per_second": {"fp32": 5e10, "bf16": 2e11},
    "memory_bytes_per_second": 1e10,
    "all_reduce_bytes_per_second": 1e9,
    "all_reduce_latency_seconds": 1e-3,
    "per_step_overhead_seconds": 2e-3,
    "hides_overhead": False,
    "step_overhead_by_stage": {
        "0": {"seconds": 2e-3, "seconds_per_weight": 1e-4, "seconds_per_weight_again": 5e-5},
        "3": STAGE_3,
    },
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def test_rates_come_back_for_as_many_ranks_of_the_same_kind(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(RATES, 2)
    assert path.is_relative_to(cache / "dsf-trainer")
    assert measured_rates(2) == RATES | {"identity": json.loads(path.read_text())["identity"]}
    assert measured_rates(4) is None
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert measured_target(Cluster(1, 2)) is None


def test_a_file_that_is_damaged_is_none(cache: Path) -> None:
    keep(RATES, 2)
    path_of(2).write_text("{", encoding="utf-8")
    assert measured_target(Cluster(1, 2)) is None


def test_a_machine_knows_what_was_measured() -> None:
    keep(RATES, 2)
    target = measured_target(Cluster(1, 2))
    assert target is not None
    assert (machine := target.machine) is not None
    assert machine.devices_per_host == 2
    assert (
        machine.origin("flops_per_second.bf16")
        == machine.origin("memory_bytes_per_second")
        == "measured"
    )


def test_the_engines_own_time_grows_with_weights_and_micro_batches_by_stage() -> None:
    machine = Machine.from_measured(RATES, devices_per_host=2)
    sizes = [10, 1000, 1000]
    plain = machine.overhead_seconds(0, sizes=sizes, micro_batches=3, persistent=100)
    assert plain == pytest.approx(2e-3 + 3 * (1e-4 + 2 * 5e-5))
    spread = machine.overhead_seconds(3, sizes=sizes, micro_batches=3, persistent=100)
    assert spread == pytest.approx(9e-3 + 3 * (1e-3 + 2 * 5e-4) + 3 * 2 * 1e-2)


def test_where_a_device_hides_it_only_the_fixed_part_counts() -> None:
    machine = Machine.from_measured(RATES | {"hides_overhead": True}, devices_per_host=2)
    assert machine.overhead_seconds(3, sizes=[1] * 99, micro_batches=9, persistent=0) == 2e-3


def test_what_was_measured_is_used_on_processors_and_states_when_and_under_which_load() -> None:
    cluster = Cluster(devices_per_host=2, device="cpu")
    assert target_at_hand(cluster, {}).machine is None
    stages = {"step_overhead_by_stage": {str(stage): STAGE_3 for stage in range(4)}}
    keep(
        RATES
        | stages
        | {"time_seconds": time.time() - 3 * 3600 - 60, "load_average": 1.24, "spread": 0.1},
        2,
    )
    target = target_at_hand(cluster, {})
    assert (target.name, target.text) == ("cpu", "cpu, rates measured 3.0 h ago at a load of 1.2")
    assert peaks_at_hand(cluster, {}) == {}, "utilisation is of a listed peak"
    asked = config_from_values({"zero": {"stage": "auto"}, "training": {"max_steps": 9}})
    _, settings, line = resolve(asked, cluster, target)
    assert settings.keys() == {"zero.stage"}
    assert line.endswith(
        " samples per second; estimated for cpu, rates measured 3.0 h ago at a load of 1.2"
    )
    assert target_at_hand(Cluster(2, 1, "cpu"), {}).machine is None, (
        "of several hosts nothing is known"
    )


def test_rates_of_a_machine_that_did_something_else_report_it() -> None:
    keep(RATES | {"time_seconds": time.time() - 9 * 86_400, "load_average": 6.0, "spread": 0.6}, 1)
    target = measured_target(Cluster(device="cpu"))
    assert target is not None
    assert (
        target.rates
        == "rates measured 216.0 h ago at a load of 6.0, unsteady: the same took up to 60% longer"
    )
    keep(RATES, 1)
    assert conditions(measured_rates(1) or {}) == "rates measured at an unknown time"
