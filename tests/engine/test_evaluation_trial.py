"""Evaluation is tried before the first step: what is wrong in it ends the run there, and what is
right leaves every number of the run as it is without the trial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from framework.engine.weights import checkpoint_weights
from framework.setup.trained import find_source
from tests.launched import series, train_cases

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "drawing": {"task": {"target": "tests.jobs.parts:DrawsInMeasure"}},
    "z3": {"zero": {"stage": 3}, "task": {"target": "tests.jobs.parts:DrawsInMeasure"}},
    "average": {
        "zero": {"stage": 2},
        "training": {"max_steps": 6, "log_every": 1, "ema": {"decay": 0.5}},
        "evaluation": {"weights": "ema", "every_steps": 3},
    },
}
PIPE = {"parallel": {"pipe": 2}, "evaluation": {"every_steps": 3, "batch_size": 7}}


def config(name: str, folder: Path, *, tries: bool, **sections: Any) -> dict[str, Any]:
    switch = {"target": "tests.jobs.parts:TriesEvaluation", "args": {"tries": tries}}
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [32], "dropout": 0.3},
        "batch": {"global_size": 120},
        "training": {"max_steps": 6, "log_every": 1},
        "evaluation": {"every_steps": 3},
        "callbacks": [switch],
        "monitors": {"tensorboard": False, "progress": "off", "report": False},
    }
    return base | sections


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    cases = []
    for name, sections in CASES.items():
        for tries in (True, False):
            cases.append(config(f"{name}-{tries}", folder, tries=tries, **sections))
    wrong: dict[str, dict[str, Any]] = {
        "measure": {"task": {"target": "tests.jobs.parts:FailsInMeasure"}},
        "metric": {
            "task": {"target": "tests.jobs.parts:DrawsInMeasure"},
            "checkpoint": {"keep_best": "eval/f1"},
        },
    }
    for name, sections in wrong.items():
        cases.append(config(name, folder, tries=True, **sections))
    train_cases(cases, num_ranks=2, folder=folder)
    piped = [config(f"pipe-{tries}", folder, tries=tries, **PIPE) for tries in (True, False)]
    train_cases(piped, num_ranks=2, folder=folder)
    return folder


@pytest.mark.parametrize("case", [*CASES, "pipe"])
def test_the_trial_changes_no_number(runs: Path, case: str) -> None:
    for name in ("train/loss", "eval/loss", "train/grad_norm"):
        assert series(runs / f"{case}-True", name) == series(runs / f"{case}-False", name)
    with_trial, without = (
        {name: torch.as_tensor(value) for name, value in checkpoint_weights(found).items()}
        for found in (find_source(str(runs / f"{case}-{tries}")) for tries in (True, False))
    )
    assert with_trial.keys() == without.keys()
    assert all(torch.equal(value, without[name]) for name, value in with_trial.items())


@pytest.mark.parametrize(
    ("case", "reported"), [("measure", "no such output"), ("metric", "[unknown-metric]")]
)
def test_what_is_wrong_ends_the_run_before_the_first_step(
    runs: Path, case: str, reported: str
) -> None:
    assert reported in (runs / f"{case}.error").read_text(encoding="utf-8")
    events = (runs / case / "events.jsonl").read_text(encoding="utf-8")
    assert "first_step" not in events
    assert '"error"' in events
