"""An optimizer's state in half precision on a CUDA device: fused kernels, and DeepSpeed's Adam on the
host beside weights on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.engine.pipe_oracle import plain_run
from tests.engine.test_pipeline import text
from tests.engine.test_states import (
    BF16,
    BF16_WEIGHTS,
    BOUND,
    DEEPSPEEDS,
    FP16_WEIGHTS,
    NUM_STEPS,
    ON_HOST,
    config,
)
from tests.launched import furthest, series, train_cases_on_gpu

__all__ = ["text"]  # a fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: states on another device not run",
    ),
]

HOST_ADAM: Final[dict[str, Any]] = {"zero": {"stage": 2, **ON_HOST}, "optimizer": DEEPSPEEDS}
CASES: Final[dict[str, dict[str, Any]]] = {
    **{f"bf16-z{stage}": {"precision": BF16, "zero": {"stage": stage}} for stage in (1, 2, 3)},
    "bf16-deepspeed": {"precision": BF16, "zero": {"stage": 2}, "optimizer": DEEPSPEEDS},
    "bf16-host": {"precision": BF16, **HOST_ADAM},
    "bf16-weights": {"precision": BF16_WEIGHTS, **HOST_ADAM},
    "fp16-weights": {"precision": FP16_WEIGHTS, **HOST_ADAM},
}
WIDE: Final[dict[str, Any]] = {"precision": {"dtype": "bf16"}, "zero": {"stage": 2}}
LION: Final[dict[str, Any]] = {"optimizer": {"kind": "lion", "lr": 5e-4, "betas": [0.9, 0.95]}}
ONE_RANK: Final[dict[str, Any]] = {"batch": {"global_size": 8, "micro_size": 2}}


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states-on-gpu")
    cases = {
        "wide": WIDE,
        **CASES,
        "lion-wide": WIDE | LION,
        "lion": {"precision": BF16, "zero": {"stage": 1}} | LION,
    }
    configs = [
        config(name, folder, text, **sections, **ONE_RANK) for name, sections in cases.items()
    ]
    train_cases_on_gpu(configs, folder=folder)
    return folder


@pytest.mark.parametrize("name", [*CASES, "lion"])
def test_losses_are_near_those_of_states_in_fp32(runs: Path, name: str) -> None:
    wide = "lion-wide" if name == "lion" else "wide"
    expected = list(series(runs / wide, "train/loss").values())
    assert furthest(runs / name, expected) < BOUND["bf16"]


@pytest.mark.parametrize("name", [name for name in CASES if "weights" not in name])
def test_losses_are_near_those_of_plain_pytorch_in_bf16(runs: Path, text: Path, name: str) -> None:
    values = config("plain", runs, text, precision={"dtype": "fp32"}, zero={"stage": 0})
    plain, _, _ = plain_run(values, micro_size=2, num_steps=NUM_STEPS, dtype=torch.bfloat16)
    assert furthest(runs / name, plain) < 0.02
