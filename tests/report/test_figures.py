"""Means and the split of a step, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.report.figures import (
    best,
    byte_unit,
    flops_unit,
    headline,
    means,
    result_text,
    state,
    summary,
    time_split,
)
from framework.report.page import page
from framework.report.records import Series, read_run
from tests.report.made_runs import EVENTS, PARTS, point, points, write_run


def test_means_leave_warm_up_out_and_weigh_by_steps(tmp_path: Path) -> None:
    lines = [
        point(10, time__step_ms=900.0, throughput__samples_per_sec=1.0),
        point(20, time__step_ms=100.0, throughput__samples_per_sec=100.0),
        point(50, time__step_ms=200.0, throughput__samples_per_sec=50.0),
    ]
    found = means(read_run(write_run(tmp_path / "run", lines=lines)))
    assert found["time/step_ms"] == pytest.approx((10 * 100 + 30 * 200) / 40)
    assert found["throughput/samples_per_sec"] == pytest.approx(10 * 1000 / found["time/step_ms"])
    alone = means(read_run(write_run(tmp_path / "short", lines=lines[:1])))
    assert alone["time/step_ms"] == 900.0


def test_the_split_adds_up_and_names_what_was_not_timed(tmp_path: Path) -> None:
    whole = time_split(means(read_run(write_run(tmp_path / "run"))))
    assert list(whole) == list(PARTS)
    assert sum(whole.values()) == pytest.approx(100.0)
    assert time_split({"time/step_ms": 50.0, "time/data_ms": 5.0}) == {
        "data": 5.0,
        "not timed": 45.0,
    }
    assert time_split({}) == {}


def test_the_best_value_is_the_least_loss_and_the_largest_accuracy() -> None:
    series = Series([1, 2, 3, 4], [2.0, float("nan"), 1.0, 3.0])
    assert best("eval/loss", series) == (3, 1.0)
    assert best("eval/word_error", series) == (3, 1.0)
    assert best("eval/accuracy", series) == (4, 3.0)


def test_the_state_of_a_run(tmp_path: Path) -> None:
    short = points(range(5, 41, 5))
    error = "2026-11-25 08:02:15,159 ERROR dsf-trainer: connection lost\n"

    def fail(folder: Path) -> None:
        (folder / "logs/rank0.log").write_text(error)

    cases = {
        "finished after 100 steps": {},
        "stopped on request after 40 of 100 steps": {
            "lines": short,
            "events": [{"kind": "stop", "step": 40}],
        },
        "stopped on request after 45 of 100 steps": {
            "lines": points(range(5, 46, 5)),
            "events": [
                EVENTS[0],
                {"kind": "stop", "step": 45},
                {"kind": "end", "step": 45, "is_finished": False},
            ],
        },
        "failed after 40 of 100 steps": {"lines": short, "events": None, "change": fail},
        "reached 40 of 100 steps; it trains, or was ended from outside": {
            "lines": short,
            "events": EVENTS[:1],
        },
        "reached 40 steps; it trains, or was ended from outside": {
            "lines": short,
            "events": None,
            "plan": {},
        },
    }
    for number, (text, options) in enumerate(cases.items()):
        assert state(read_run(write_run(tmp_path / str(number), **options))) == text


def test_an_error_wins_over_the_number_of_steps(tmp_path: Path) -> None:
    """The last evaluation and the last save come after the last step."""
    end = {"kind": "end", "step": 100, "is_finished": True}
    failed = {"kind": "end", "step": 100, "error": "step 100: callback Bad 1: boom"}
    for number, events in enumerate(([EVENTS[0], failed], [EVENTS[0], end, failed])):
        run = read_run(write_run(tmp_path / str(number), events=events))
        found = summary(run)
        assert found["state"] == "failed after 100 of 100 steps"
        assert (found["outcome"], found["error"]) == ("failed", failed["error"])
        page_text = page([run])
        assert page_text.index("Failed after 100 of 100") < page_text.index("compute-bound")
    resumed = [EVENTS[0], failed, {"kind": "resume", "step": 80}, end]
    run = read_run(write_run(tmp_path / "resumed", events=resumed))
    assert (state(run), summary(run)["error"]) == ("finished after 100 steps", None)


def test_an_error_of_an_earlier_start_is_not_of_this_one(tmp_path: Path) -> None:
    failed = {"kind": "end", "step": 20, "error": "connection lost"}
    events = [EVENTS[0], failed, {"kind": "resume", "step": 20}]

    def fail(folder: Path) -> None:
        line = "2026-11-25 08:02:15,159 ERROR dsf-trainer: error: connection lost\n"
        (folder / "logs/rank0.log").write_text(line)

    lines = points(range(5, 41, 5))
    run = read_run(write_run(tmp_path / "run", lines=lines, events=events, change=fail))
    assert state(run).startswith("reached 40 of 100 steps")
    assert summary(run)["outcome"] == "open"


def test_headline_and_summary_agree(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    groups = headline(run)
    assert list(groups) == ["Result", "Time", "Speed and memory"]
    assert groups["Result"][0] == ("best eval/accuracy", "0.8333 at step 100")
    rows = dict(row for rows in groups.values() for row in rows)
    assert rows["best eval/accuracy"] == "0.8333 at step 100"
    assert rows["MFU"] == "35.0%"
    assert rows["peak device memory"] == "2.5 GiB"
    found = summary(run)
    assert found["best"]["eval/accuracy"] == {"step": 100, "value": pytest.approx(100 / 120)}
    assert found["verdict"]["kind"] == "compute-bound"
    assert found["step"] == found["total_steps"] == 100


def test_the_metric_of_the_result_is_the_one_that_is_kept(tmp_path: Path) -> None:
    plain = read_run(write_run(tmp_path / "plain"))
    assert result_text(plain) == "eval/accuracy 0.8333, best at step 100"
    kept = read_run(
        write_run(
            tmp_path / "kept",
            config={"checkpoint": {"keep_best": "eval/loss"}},
            lines=[point(1, eval__loss=0.5, eval__accuracy=0.9), point(2, eval__loss=0.75)],
        )
    )
    assert result_text(kept) == "eval/loss 0.5, best at step 1 (0.75 at 2)"
    bare = read_run(write_run(tmp_path / "bare", lines=[point(3, train__loss=0.25)]))
    assert result_text(bare) == "train/loss 0.25 at step 3, not evaluated"
    assert result_text(read_run(write_run(tmp_path / "none", lines=[point(3)]))) == ""


def test_units_are_those_of_the_largest_value() -> None:
    assert byte_unit(1000) == ("B", 1)
    assert byte_unit(4.35 * 2**20) == ("MiB", 2**20)
    assert byte_unit(3 * 2**50) == ("TiB", 2**40)
    assert flops_unit(312.0) == ("TFLOP/s", 1)
    assert flops_unit(0.0027) == ("GFLOP/s", 1e3)
    assert flops_unit(1e-5) == ("MFLOP/s", 1e6)
