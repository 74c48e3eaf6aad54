"""Trials and measurements of a machine: what is refused, what fails, and what is printed; real
steps are in tests/benchmarks/test_planner_ranking.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from framework.commands import trials as trials_module
from framework.commands.measure import environment_of_ranks, measure
from framework.commands.timed_runs import NO_TIMES
from framework.commands.torch_child import failure_of
from framework.commands.trials import Trial, fastest, run_trials, table, within_noise
from framework.config.load import config_from_values
from framework.errors import TrainingError, UsageError
from framework.plan.candidate import Candidate
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate
from framework.plan.plan import make_plan
from framework.report.records import RunRecords
from framework.system.parent_watch import FAILURES_VARIABLE, record_failure

CONFIG = config_from_values({"model": {"kind": "mlp"}, "training": {"max_steps": 9}})
PLAN = make_plan(CONFIG, Cluster(device="cpu"))


def test_the_fastest_is_that_of_the_median_and_what_failed_is_listed() -> None:
    trials = [
        Trial("a", PLAN, None, [[0.3, 0.1, 0.2], [0.21], [0.2]]),
        Trial("b", PLAN, 0.05, [[0.15, 9.0, 0.14], [0.155], [0.14]]),
        Trial("c", PLAN, 0.01, [[0.01]], "exit code 70: no memory [out-of-memory]"),
    ]
    assert fastest(trials) == 1
    assert list(table(trials))[1:] == [
        "          a: estimate not known, measured 200.0 ms (200.0 to 210.0)",
        "          b: estimate 50.0 ms, measured 150.0 ms (140.0 to 155.0)  <- fastest",
        "          c: estimate 10.0 ms, measured exit code 70: no memory [out-of-memory]",
    ]
    assert trials[2].to_dict()["measured_seconds"] is None
    assert not within_noise(trials)
    trials[0].rounds = [[0.16], [0.16], [0.145]]
    assert within_noise(trials)
    assert list(table(trials))[2].endswith(
        "<- fastest, within noise: try again, or take either of the two"
    )
    assert not within_noise(trials[1:])


def test_both_are_for_one_host() -> None:
    hosts = make_plan(CONFIG, Cluster(num_hosts=2, device="cpu"))
    with pytest.raises(UsageError, match="--trials runs on this machine alone"):
        run_trials([Candidate({}, hosts, estimate(PLAN))])
    with pytest.raises(UsageError, match="--measure measures this machine alone"):
        measure(hosts.cluster)


def test_a_run_without_times_of_steps_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "run_alone", lambda plan, **_: (RunRecords(Path("run")), ""))
    with pytest.raises(TrainingError, match=rf"{NO_TIMES} \[trials-failed\]"):
        run_trials([Candidate({}, PLAN, estimate(PLAN))])


@pytest.mark.slow
def test_where_none_runs_each_reason_is_given_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    half = config_from_values(CONFIG.to_dict() | {"precision": {"dtype": "fp16"}})
    candidate = Candidate({"zero.stage": 1}, replace(PLAN, config=half), estimate(PLAN))
    with pytest.raises(
        TrainingError,
        match=r"no strategy runs on this machine: zero.stage: 1: exit code 78: .*\[fp16-",
    ):
        run_trials([candidate])
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("round ") == 1  # not tried again


def test_the_reason_is_the_first_error_and_not_another_line_in_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = tmp_path / "failures.jsonl"
    stderr = "warning: set it [image-damaged]\nlaunch: rank 0 exited with 70\n"
    assert failure_of(stderr, failures) == "launch: rank 0 exited with 70"
    assert failure_of("", failures) == "it printed nothing"
    monkeypatch.setenv(FAILURES_VARIABLE, str(failures))
    record_failure("a.yaml: wrong [one]\na.yaml: wrong, too [two]")
    record_failure("later [three]")
    assert failure_of(stderr, failures) == "a.yaml: wrong [one]"


def test_ranks_are_of_no_other_job_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = environment_of_ranks(10_000)
    assert "RANK" not in found
    assert found["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment_of_ranks(2)["OMP_NUM_THREADS"] == "7"
