"""Weights that a callback writes on a CUDA device are what is trained and saved, at every ZeRO
stage and precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import framework
from framework.recipes.image_models.small_nets import LeNet
from tests.engine.oracle import digit_batches
from tests.launched import series, train_cases_on_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: fp16 and NCCL not run",
    ),
]

STEPS, GLOBAL_SIZE, BOUND = 20, 120, 0.05
CASES = {
    f"{precision['dtype']}-z{stage}": {"precision": precision, "zero": {"stage": stage}}
    for precision in ({"dtype": "fp32", "matmul": "highest"}, {"dtype": "bf16"}, {"dtype": "fp16"})
    for stage in (0, 1, 2, 3)
}


class Clamp:
    """A callback that keeps every weight within a bound."""

    @torch.no_grad()
    def on_step(self, state: framework.State) -> None:
        with state.gathered():
            for weight in state.model.parameters():
                weight.clamp_(-BOUND, BOUND)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    shared: dict[str, Any] = {
        "batch": {"global_size": GLOBAL_SIZE},
        "callbacks": [{"target": "tests.gpu.test_written_weights_on_gpu:Clamp"}],
        "evaluation": {"at_end": False},
        "monitors": {"progress": "off"},
        "optimizer": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.01},
        "training": {"max_steps": STEPS, "log_every": 1},
    }
    configs = [
        {"run": {"name": name, "output_dir": str(folder)}, **shared, **case}
        for name, case in CASES.items()
    ]
    train_cases_on_gpu(configs, folder=folder)
    return folder


def clamped_losses() -> list[float]:
    """Losses of a plain PyTorch loop on a processor that keeps weights within the bound after each
    step.
    """
    torch.manual_seed(0)
    model = LeNet(num_classes=10, in_channels=1, image_size=28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for images, labels in digit_batches(global_size=GLOBAL_SIZE, num_steps=STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(-BOUND, BOUND)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_a_plain_loop_that_writes_the_same(runs: Path, stage: int) -> None:
    expected = clamped_losses()
    assert expected[-1] < expected[0]
    assert [*series(runs / f"fp32-z{stage}", "train/loss").values()] == pytest.approx(
        expected, rel=2e-3
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_what_was_written(runs: Path, name: str) -> None:
    model = framework.load(runs / name)
    largest = max(float(weight.detach().float().abs().max()) for weight in model.parameters())
    assert largest == pytest.approx(BOUND, rel=2**-8), "weights reach the bound, and none passes it"
