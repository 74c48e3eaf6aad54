"""Every verdict is provoked, and each threshold from both sides."""

from __future__ import annotations

from typing import Any

import pytest

from framework.report.verdict import Verdict, judge

# A step of 100 ms that nothing holds up.
BUSY = {"data": 1, "copy": 1, "forward": 30, "backward": 55, "communication": 5, "optimizer": 6}


def judged(*, mfu: float | None = None, peak: float | None = None, **parts: Any) -> Verdict:
    names = ("pipe_size", "accumulation_steps", "device_bytes", "saving_share")
    options = {name: parts.pop(name) for name in names if name in parts}
    parts = BUSY | parts
    metrics = {f"time/{name}_ms": float(value) for name, value in parts.items()}
    metrics |= {"time/step_ms": 100.0, "time/other_ms": metrics.get("time/other_ms", 2.0)}
    metrics |= {} if mfu is None else {"throughput/mfu": mfu}
    metrics |= {} if peak is None else {"memory/device_peak_bytes": peak}
    return judge(metrics, **options)


@pytest.mark.parametrize(
    ("run", "kind", "figure"),
    [
        ({}, "compute-bound", "forward and backward take 85% of a step"),
        ({"mfu": 0.45}, "compute-bound", "at 45% of the device's peak (MFU)"),
        ({"data": 35}, "data-bound", "35% of a step (35 ms of 100 ms)"),
        ({"data": 10}, "data-bound", "10% of a step"),
        ({"data": 9.9}, "compute-bound", "85%"),
        ({"communication": 40}, "communication-bound", "40% of a step"),
        ({"communication": 24.9}, "compute-bound", "85%"),
        ({"saving_share": 0.12}, "checkpoint-bound", "12% of the time for steps and saves"),
        ({"other": 15, "copy": 10}, "host-bound", "25% of a step"),
        (
            {"other": 10, "optimizer": 45, "forward": 20, "backward": 20},
            "host-bound",
            "56% of a step",
        ),
        ({"mfu": 0.03}, "host-bound", "3.0% of its peak"),
        ({"pipe_size": 4, "accumulation_steps": 4}, "bubble-bound", "idle for 43% of it"),
        ({"pipe_size": 4, "accumulation_steps": 13}, "compute-bound", "85%"),
        ({"peak": 76e9, "device_bytes": 80e9}, "memory-bound", "95% of a device's memory"),
        (
            {"peak": 76e9, "device_bytes": 80e9, "mfu": 0.5},
            "compute-bound",
            "50% of the device's peak",
        ),
        ({"peak": 60e9, "device_bytes": 80e9}, "compute-bound", "85%"),
        ({"forward": 20, "backward": 25}, "mixed", "backward 25% and forward 20%"),
        # Of several causes, the one that exceeds its threshold most.
        ({"data": 30, "communication": 40}, "data-bound", "30%"),
        ({"data": 11, "communication": 60}, "communication-bound", "60%"),
    ],
    ids=str,
)
def test_what_bounds_a_run(run: dict[str, Any], kind: str, figure: str) -> None:
    found = judged(**run)
    assert (found.kind, found.sentence.partition(":")[0]) == (kind, kind)
    assert figure in found.sentence
    assert found.advice
    assert "\n" not in found.sentence + found.advice


def test_a_run_out_of_memory_is_memory_bound_without_a_step() -> None:
    for error in ("CUDA out of memory. Tried to allocate", "[out-of-memory]"):
        assert judge({}, ended_with=error).kind == "memory-bound"
    assert judge({}, ended_with="connection lost").kind == "unknown"


def test_an_old_run_is_judged_by_what_it_measured() -> None:
    slow = judge({"time/step_ms": 50.0, "time/data_ms": 20.0})
    assert (slow.kind, slow.share) == ("data-bound", pytest.approx(0.4))
    quick = judge({"time/step_ms": 50.0, "time/data_ms": 0.5})
    assert (quick.kind, quick.share) == ("unknown", None)
    assert quick.sentence == (
        "not data-bound: waiting for data takes 1.0% of a step, and its other parts were not timed"
    )


@pytest.mark.parametrize("step", [None, 0.0, float("nan"), float("inf"), -1.0])
def test_without_the_time_of_a_step_nothing_is_claimed(step: float | None) -> None:
    metrics = {"time/data_ms": 5.0} | ({} if step is None else {"time/step_ms": step})
    assert judge(metrics).kind == "unknown"


def test_a_part_that_is_no_number_is_left_out() -> None:
    assert judged(data=float("nan")).kind == "compute-bound"
