"""Long sums of half-precision gradients, held against the same sum in fp64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.parts import steep_samples
from tests.launched import rarely, series, train_cases

pytestmark = pytest.mark.slow

# Of a sum in bf16, the first loses two hundredths, and the second a fifth.
SOME, MANY = 128, 512


def config(name: str, folder: Path, *, stage: int, **precision: Any) -> dict[str, Any]:
    parts = "tests.jobs.parts"
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"target": f"{parts}:weighted_sum"},
        "data": {"target": f"{parts}:steep_samples"},
        "task": {"target": f"{parts}:mean_output"},
        "precision": {"dtype": "bf16", **precision},
        "zero": {"stage": stage},
        "optimizer": {"kind": "sgd", "lr": 0.0},
        "training": {"max_steps": 1, "log_every": 1, "clip_grad_norm": 1e6},
        "checkpoint": {"at_end": False},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        "batch": {"micro_size": 1, "accumulation_steps": MANY if name.endswith("-bf16") else SOME},
    }


def exact_norm(num_samples: int) -> float:
    """Of the mean over the step's samples; all of them are read, so that their order does not
    matter.
    """
    inputs = steep_samples(num_samples).tensors[0]
    return math.hypot(float(inputs.double().mean(dim=0).norm()), 1.0)


@pytest.fixture(scope="module")
def norms(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("sums")
    plain = [config(f"z{stage}", folder, stage=stage) for stage in (1, 2, 3)]
    plain += [
        config(f"z{stage}-bf16", folder, stage=stage, grad_accumulation="bf16")
        for stage in ((0, 2, 3) if exhaustive else (0, 3))
    ]
    plain += [config("z2-fp32-reduced", folder, stage=2, grad_reduction="fp32")]
    plain += [config("fp16", folder, stage=1) | {"precision": {"dtype": "fp16", "loss_scale": 1.0}}]
    for case in plain:
        count = 2 * case["batch"]["accumulation_steps"]
        case["data"] = {**case["data"], "args": {"count": count}}
    train_cases(plain, num_ranks=2, folder=folder, allow_fp16=True)
    pipeline = {**config("pipe", folder, stage=1), "parallel": {"pipe": 2, "stages": [0, 1]}}
    pipeline["data"] = {**pipeline["data"], "args": {"count": SOME}}
    train_cases([pipeline], num_ranks=2, folder=folder)
    return {
        case["run"]["name"]: series(folder / case["run"]["name"], "train/grad_norm")[1]
        for case in [*plain, pipeline]
    }


@pytest.mark.parametrize("name", ["z1", "z2", "z3", "z2-fp32-reduced", "fp16", "pipe"])
def test_a_long_sum_is_fp32_by_default(norms: dict[str, float], name: str) -> None:
    # where two ranks' sums are added in half precision
    rounded_once = 1e-4 if name.endswith("reduced") else 2.0**-9
    assert norms[name] == pytest.approx(
        exact_norm(SOME * (1 if name == "pipe" else 2)), rel=rounded_once
    )


@pytest.mark.parametrize("name", ["z0-bf16", "z3-bf16", *rarely(("z2-bf16",))])
def test_a_sum_in_bf16_is_short(norms: dict[str, float], name: str) -> None:
    """What the default avoids: where DeepSpeed sums otherwise one day, the note on stage 0 goes."""
    assert norms[name] < 0.985 * exact_norm(2 * MANY)
