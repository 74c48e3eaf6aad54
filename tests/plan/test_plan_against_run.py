"""Plan against run: what is compared, when, and what stays in plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.candidate import Candidate, judge
from framework.plan.cluster import Cluster
from framework.plan.devices import Device, Machine
from framework.plan.hardware import Hardware
from framework.plan.plan import make_plan
from framework.plan.plan_against_run import PlanAgainstRun, estimates_here
from framework.train.monitors.base import Point

GPT = {
    "model": {"kind": "gpt"},
    "data": {"kind": "text"},
    "task": {"kind": "causal_lm"},
    "training": {"max_steps": 9},
}
PLAN = make_plan(config_from_values(GPT), Cluster(device="cuda"))
MACHINE = Machine(
    Device("some", flops_per_second={"fp32": 1e12, "bf16": 1e12}, memory_bytes_per_second=1e11)
)
PEAK = 12345678.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text('{"layout": {"micro_size": 1}}', encoding="utf-8")
    return path


def estimated(_: object) -> Candidate:
    return judge(PLAN, Hardware("some", machine=MACHINE))


def compare(
    file: Path, *points: dict[str, float], estimated: Any = estimated
) -> tuple[list[str], dict[str, Any]]:
    """Write points, ten steps apart, and return the lines and what plan.json holds then."""
    lines: list[str] = []
    monitor = PlanAgainstRun(PLAN, file.parent, print_line=lines.append, estimated=estimated)
    for number, metrics in enumerate(points, start=1):
        monitor.write(Point(10 * number, 0.0, 0.0, metrics))
    monitor.close()
    return lines, json.loads(file.read_text(encoding="utf-8"))


def test_memory_is_the_first_points_and_time_the_seconds(file: Path) -> None:
    points = [
        {"time/step_ms": ms, "memory/device_peak_bytes": PEAK + ms} for ms in (900.0, 50.0, 40.0)
    ]
    lines, kept = compare(file, *points)
    candidate = estimated(None)
    assert candidate.time is not None
    assert kept["layout"] == {"micro_size": 1}
    assert kept["measured"] == {
        "step": 20,
        "device_peak_bytes": {"measured": PEAK + 900, "estimate": candidate.peak_bytes},
        "step_seconds": {"measured": 0.05, "with_warm_up": False, "estimate": candidate.time.total},
    }
    assert len(lines) == 2
    assert lines[0].startswith("plan against run: peak memory: estimate ")
    assert lines[1].startswith("plan against run: step time: estimate ")
    assert ", measured 50.0 ms (" in lines[1]


def test_on_processors_memory_is_not_measured_and_not_compared(file: Path) -> None:
    lines, kept = compare(file, {"time/step_ms": 90.0}, {"time/step_ms": 50.0})
    assert kept["measured"]["device_peak_bytes"]["measured"] is None
    assert [line.split(":")[1] for line in lines] == [" step time"]


def test_a_run_with_one_logged_point_has_its_warm_up_in_the_time(file: Path) -> None:
    _, kept = compare(file, {"time/step_ms": 90.0}, {"eval/loss": 1.0})
    assert kept["measured"]["step_seconds"]["with_warm_up"] is True
    assert kept["measured"]["step"] == 10


def test_nothing_is_written_where_nothing_was_logged(file: Path) -> None:
    assert compare(file, {"eval/loss": 1.0}) == ([], {"layout": {"micro_size": 1}})


def test_what_is_not_estimated_is_kept_as_measured(file: Path) -> None:
    lines, kept = compare(file, *[{"time/step_ms": 50.0}] * 2, estimated=lambda plan: None)
    assert lines == []
    assert kept["measured"]["step_seconds"] == {
        "measured": 0.05,
        "with_warm_up": False,
        "estimate": None,
    }


def test_the_estimates_of_an_own_model_are_not_guessed() -> None:
    own = config_from_values(
        GPT | {"model": {"target": "framework.recipes.image_models.small_nets:LeNet"}}
    )
    assert estimates_here(make_plan(own, Cluster(device="cuda"))) is None


def test_a_device_that_is_not_listed_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DSF_GPU", "h900")
    assert estimates_here(PLAN) is None
