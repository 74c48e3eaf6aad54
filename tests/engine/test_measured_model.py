"""The model that is measured is the one that is saved, where every data-parallel rank keeps
statistics of its own batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engine.saved_runs import read_weights
from tests.jobs.batch_parts import normed
from tests.jobs.pipe_parts import points
from tests.launched import read_metrics, train_cases

pytestmark = pytest.mark.slow

TOTAL, STOP = 6, 3
PLAIN: dict[str, dict[str, Any]] = {
    "z0": {},
    "z1": {"zero": {"stage": 1}},
    "z3": {"zero": {"stage": 3}},
    "async": {"checkpoint": {"mode": "async"}},
}
PIPED: dict[str, dict[str, Any]] = {
    "z0": {"parallel": {"pipe": 2}},
    "z1": {"parallel": {"pipe": 2}, "zero": {"stage": 1}},
}


def config(
    name: str, sections: dict[str, Any], folder: Path, *, max_steps: int = TOTAL
) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"target": "tests.jobs.batch_parts:normed"},
        "data": {"target": "tests.jobs.pipe_parts:points"},
        "batch": {"global_size": 16, "micro_size": 4},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "training": {"max_steps": max_steps, "log_every": 1},
        "evaluation": {"every_steps": STOP, "batch_size": 2},
        "monitors": {"tensorboard": False, "progress": "off"},
        **sections,
        "checkpoint": {
            "every_steps": STOP,
            "keep_last": 9,
            "resume": "auto",
            **sections.get("checkpoint", {}),
        },
    }


def train(cases: dict[str, dict[str, Any]], folder: Path, *, num_ranks: int) -> Path:
    whole = [config(f"{name}-whole", sections, folder) for name, sections in cases.items()]
    first = [
        config(f"{name}-broken", sections, folder, max_steps=STOP)
        for name, sections in cases.items()
    ]
    train_cases([*whole, *first], num_ranks=num_ranks, folder=folder)
    second = [config(f"{name}-broken", sections, folder) for name, sections in cases.items()]
    train_cases(second, num_ranks=num_ranks, folder=folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(PLAIN, tmp_path_factory.mktemp("plain"), num_ranks=2)


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(PIPED, tmp_path_factory.mktemp("piped"), num_ranks=4)


RUNS = [*(("plain", name) for name in PLAIN), *(("piped", name) for name in PIPED)]


def measured(run: Path) -> dict[int, tuple[float, float]]:
    return {
        int(row["step"]): (row["eval/loss"], row["eval/accuracy"])
        for row in read_metrics(run)
        if "eval/loss" in row
    }


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_what_was_measured_is_what_stands_in_the_checkpoint(
    kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(kind) / f"{name}-whole"
    inputs, labels = points()[1].tensors
    assert sorted(measured(run)) == [STOP, TOTAL]
    for step, (loss, accuracy) in measured(run).items():
        model = normed()
        weights = read_weights(str(run / "checkpoints" / f"global_step{step}"))
        model.load_state_dict({key: weights[key] for key in model.state_dict()})
        model.eval()
        with torch.no_grad():
            outputs = model(inputs)
        assert loss == pytest.approx(float(cross_entropy(outputs, labels)), abs=1e-6)
        assert accuracy == pytest.approx(
            float((outputs.argmax(dim=1) == labels).double().mean()), abs=1e-9
        )


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_a_resumed_run_measures_what_the_unbroken_one_does(
    kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    assert measured(folder / f"{name}-broken") == measured(folder / f"{name}-whole")
