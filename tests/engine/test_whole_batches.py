"""What becomes of a batch on its way through a run: its targets, what its `collate_fn` draws, its
gradients, its metrics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.batch_parts import TARGET, WIDTH, scaled
from tests.launched import read_metrics, series, train_cases

pytestmark = pytest.mark.slow

PARTS = "tests.jobs.batch_parts"
FAR: dict[str, Any] = {
    "model": {"target": f"{PARTS}:zeros"},
    "data": {"target": f"{PARTS}:far_targets"},
    "task": {"target": "torch.nn.functional:mse_loss"},
}
DRAWN = FAR | {"model": {"target": f"{PARTS}:same"}, "data": {"target": f"{PARTS}:drawn_twice"}}
ONES = FAR | {
    "model": {"target": f"{PARTS}:scaled"},
    "data": {"target": f"{PARTS}:ones"},
    "optimizer": {"kind": "sgd", "lr": 0.05},
}
BF16 = {"precision": {"dtype": "bf16"}}
PLAIN: dict[str, dict[str, Any]] = {
    "far": FAR | BF16,
    "far-z2": FAR | BF16 | {"zero": {"stage": 2}},
    "rooted": FAR | {"task": {"target": f"{PARTS}:Rooted"}},
    **{f"scaled-z{stage}": ONES | {"zero": {"stage": stage}} for stage in (0, 1, 2, 3)},
    **{
        f"rootless-z{stage}": FAR
        | {"model": {"target": f"{PARTS}:rootless"}, "zero": {"stage": stage}}
        for stage in (0, 1, 2, 3)
    },
}
PIPED: dict[str, dict[str, Any]] = {
    "far": FAR | BF16 | {"zero": {"stage": 1}},
    "drawn": DRAWN,
    "rooted": FAR | {"task": {"target": f"{PARTS}:Rooted"}},
}


def config(name: str, sections: dict[str, Any], folder: Path, *, pipe: int) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 8, "micro_size": 4},
        "optimizer": {"kind": "sgd", "lr": 0.0},
        "parallel": {"pipe": pipe},
        "training": {"max_steps": 40 if "rootless" in name else 4, "log_every": 2},
        "evaluation": {"every_steps": 2, "batch_size": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "monitors": {"tensorboard": False, "progress": "off"},
        **sections,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train_cases(
        [config(name, sections, folder, pipe=1) for name, sections in PLAIN.items()],
        num_ranks=2,
        folder=folder,
    )
    return folder


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("piped")
    train_cases(
        [config(name, sections, folder, pipe=2) for name, sections in PIPED.items()],
        num_ranks=2,
        folder=folder,
    )
    return folder


@pytest.mark.parametrize(
    ("engine", "name"), [("plain", "far"), ("plain", "far-z2"), ("piped", "far")]
)
def test_a_target_keeps_its_digits_in_half_precision(
    engine: str, name: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(engine) / name
    assert set(series(run, "train/loss").values()) == {TARGET**2}
    assert set(series(run, "eval/loss").values()) == {TARGET**2}


def test_both_ends_of_a_pipeline_see_the_same_draws_of_a_collate_fn(piped: Path) -> None:
    assert set(series(piped / "drawn", "train/loss").values()) == {0.0}
    assert set(series(piped / "drawn", "eval/loss").values()) == {0.0}


def test_a_weight_without_dimensions_is_refused_at_stage_3(plain: Path) -> None:
    reported = (plain / "scaled-z3.error").read_text(encoding="utf-8")
    assert reported.startswith("zero.stage = 3: the model has a weight without dimensions")
    assert reported.endswith("[scalar-weight]")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_without_dimensions_is_trained_as_in_plain_pytorch(
    stage: int, plain: Path
) -> None:
    model, losses = scaled(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.ones(8, WIDTH)), torch.full((8,), 3.0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    found = series(plain / f"scaled-z{stage}", "train/loss")
    assert found == pytest.approx({2: losses[1], 4: losses[3]}, abs=1e-6)
    assert losses[3] < losses[1] - 0.1


@pytest.mark.parametrize("engine", ["plain", "piped"])
def test_what_a_task_holds_is_moved_to_the_device(
    engine: str, request: pytest.FixtureRequest
) -> None:
    assert series(request.getfixturevalue(engine) / "rooted", "eval/moved") == {2: 1.0, 4: 1.0}


def test_a_derived_metric_that_is_a_tensor_is_logged_and_saved(plain: Path) -> None:
    run = plain / "rooted"
    assert series(run, "eval/root") == pytest.approx({2: TARGET, 4: TARGET})
    manifests = sorted(run.glob("checkpoints/global_step*/*manifest*"))
    assert len(manifests) == 2
    assert all(
        "eval/root" in json.dumps(json.loads(path.read_text(encoding="utf-8")))
        for path in manifests
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_that_skips_every_step_does_not_end_well(stage: int, plain: Path) -> None:
    """DeepSpeed skips them and says nothing; the loss is a number all the time."""
    reported = (plain / f"rootless-z{stage}.error").read_text(encoding="utf-8")
    assert reported.startswith("step 20: each of the last 20 steps was skipped")
    assert reported.endswith("[every-step-skipped]")


def test_at_stage_0_the_same_model_ends_at_its_first_save(plain: Path) -> None:
    reported = (plain / "rootless-z0.error").read_text(encoding="utf-8")
    assert reported.endswith("[loss-not-finite]")


def test_other_runs_ended_well(plain: Path, piped: Path) -> None:
    for run in (plain / "far", plain / "rooted", piped / "far", piped / "drawn"):
        assert read_metrics(run)[-1]["step"] == 4
