"""Evaluation is tried before the first step: what is wrong in it ends the run there, and what is
right leaves every number of the run as it is without the trial.
"""

from __future__ import annotations

import json
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


def sized(name: str, micro_size: Any = "measured", *, steps: int = 2) -> dict[str, Any]:
    """A run with 12 samples on each rank, of which rank 1 has memory for 5 at once, and with a task
    that has a state; again under the same name it goes on.
    """
    return {
        "run": {"name": name},
        "model": {"target": "tests.jobs.parts:NoRoomOnRank1", "args": {"most": 5}},
        "task": {"target": "tests.jobs.parts:CountsItsCalls"},
        "batch": {"global_size": 24, "micro_size": micro_size},
        "training": {"max_steps": steps, "log_every": 1},
        "evaluation": {"at_end": False, "batch_size": 4},
        "checkpoint": {"resume": "auto"},
        "monitors": {"tensorboard": False, "progress": "off", "report": False},
    }


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
    cases += [sized("size-given", 4), sized("size-measured"), sized("size-measured", steps=3)]
    for case in cases[-3:]:
        case["run"]["output_dir"] = str(folder)
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


def test_a_measured_micro_batch_is_one_that_all_ranks_have_memory_for(runs: Path) -> None:
    given = series(runs / "size-given", "train/loss")
    found = series(runs / "size-measured", "train/loss")
    assert [found[step] for step in (1, 2)] == [given[1], given[2]]
    assert list(found) == [1, 2, 3]
    lines = (runs / "size-measured/events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    (measured,) = [event for event in events if event["kind"] == "measured"]
    assert measured["micro_size"] == 4
    assert {size: peak is None for size, peak in measured["peak_bytes"].items()} == {
        "1": False,
        "2": False,
        "4": False,
        "6": True,
        "8": True,
    }
    plan = json.loads((runs / "size-measured/plan.json").read_text(encoding="utf-8"))
    assert plan["auto"] == {"batch.micro_size": 4}
    assert plan["layout"]["accumulation_steps"] == 3
    kinds = [event["kind"] for event in events]
    assert "resume" in kinds[kinds.index("measured") :], "which keeps it"


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
