"""A slice of the ranking: the machine is measured, strategies run in turn, and what does not run is
told.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner.ranking import compared, estimate, name_of, plans, spearman
from benchmarks.records import RESULTS
from framework.commands import measure, timed_runs
from framework.commands.trials import Trial, fastest, measure_trials, table
from framework.config.load import config_from_values
from framework.plan.devices import Machine
from tests.commands.children import fork_launched
from tests.launched import ROOT
from tests.warm_ranks import WarmRanks


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # as scipy.stats.spearmanr
    assert spearman([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_the_committed_ranking_is_right() -> None:
    found = json.loads((RESULTS / "planner_ranking.json").read_text(encoding="utf-8"))
    assert [each["settings"] for each in found["strategies"]] == [name_of(plan) for plan in plans()]
    machine = Machine.from_measured(found["rates"], devices_per_host=2)
    for plan, each in zip(plans(), found["strategies"], strict=True):
        # still what is estimated
        assert each["estimate_seconds"] == pytest.approx(estimate(plan, machine), rel=0.05)
    agreement = compared(found["strategies"])
    assert {way: found[way] for way in agreement} == {
        way: pytest.approx(of) for way, of in agreement.items()
    }
    assert agreement["tenth"]["spearman"] >= 0.8
    assert agreement["tenth"]["chosen_over_fastest"] <= 1.1


@pytest.mark.slow
@pytest.mark.timing
def test_a_measured_machine_ranks_what_trials_measure(
    warm: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exhaustive: bool
) -> None:
    """Without --exhaustive one of the two strategies runs, and the order is that of the estimates;
    each figure of the machine is taken in less time than `plan --measure` takes; and ranks are
    forked where launchers would start them.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    temporary, stated = tmp_path / "temporary", tmp_path / "said"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    job, whole = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m",
        "framework.commands.machine_rates",
    )
    run = measure.run_child

    def fork(
        words: Sequence[str], *_: object, longest_seconds: float
    ) -> subprocess.CompletedProcess[str]:
        assert [*words[:-1]] == [*job.split(), whole]
        started = warm.start(
            [words[-1]], num_ranks=2, folder=stated, script=ROOT / "tests/jobs/short_rates.py"
        )
        return subprocess.CompletedProcess(
            [*words], max(started.wait(longest_seconds)), "", started.stated()
        )

    def short(words: Sequence[str], *rest: Any, **limits: Any) -> subprocess.CompletedProcess[str]:
        return run(
            ["tests.jobs.short_rates" if word == whole else word for word in words], *rest, **limits
        )

    monkeypatch.setattr(measure, "run_child", short if exhaustive else fork)
    if not exhaustive:
        monkeypatch.setattr(timed_runs, "run_child", partial(fork_launched, folder=stated))
    rates = measure.measure_machine(2)
    machine = Machine.from_measured(rates, devices_per_host=2)
    assert (
        machine.origin("flops_per_second.fp32")
        == machine.origin("collective_bytes_per_second")
        == "measured"
    )
    assert 0 < rates["all_reduce_latency_seconds"] < 1
    assert (
        rates["step_overhead_by_stage"]["0"]["seconds"]
        < rates["step_overhead_by_stage"]["3"]["seconds"]
    )
    plain, _, _, spread = plans(range(4), [4])
    odd = config_from_values(plain.config.to_dict() | {"batch": {"global_size": 7}})
    assert estimate(spread, machine) > estimate(plain, machine)
    tried = (spread, plain) if exhaustive else (plain,)
    trials = [Trial(name_of(plan), plan, estimate(plan, machine)) for plan in tried]
    trials.append(Trial("refused", replace(plain, config=odd)))
    notes: list[str] = []
    measure_trials(trials, note=notes.append, rounds=1)
    assert len(notes) == len(trials)
    assert trials[-1].failure.startswith("exit code 78: ")
    assert list(temporary.iterdir()) == []
    assert all([len(one) for one in trial.rounds] == [4] for trial in trials[:-1])
    medians = [trial.median_seconds or 0.0 for trial in trials[:-1]]
    assert medians[-1] == min(medians) > 0
    assert fastest(trials) == len(trials) - 2
    assert sum("<- fastest" in line for line in table(trials)) == 1
