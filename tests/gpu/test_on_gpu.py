"""What needs a CUDA device: NCCL, fp16 with loss scaling, fused kernels, and that nothing waits
between logged points.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.oracle import digit_batches, plain_losses
from tests.gpu.oracles import lamb, lion
from tests.launched import ROOT, hold_parts, read_metrics, series, torchrun, train_cases_on_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: fp16 and NCCL not run",
    ),
]

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{dtype}-z{stage}": {"precision": {"dtype": dtype}, "zero": {"stage": stage}}
        for dtype in ("fp32", "fp16", "bf16", "autocast")
        for stage in (0, 1, 2, 3)
    },
    "fused-adam": {
        "optimizer": {"kind": "adamw", "implementation": "deepspeed"},
        "precision": {"dtype": "bf16"},
    },
    "lamb": {"optimizer": {"kind": "lamb", "lr": 0.02}, "precision": {"dtype": "fp16"}},
    "lion": {"optimizer": {"kind": "lion", "lr": 5e-4}, "precision": {"dtype": "bf16"}},
    **{
        f"muon-z{stage}": {
            "optimizer": {
                "kind": "muon",
                "lr": 0.01,
                "adam_lr": 2e-3,
                "matrices": [r"fc.\.weight"],
            },
            "precision": {"dtype": "bf16"},
            "zero": {"stage": stage},
        }
        for stage in (2, 3)
    },
    "average": {
        "precision": {"dtype": "fp16"},
        "zero": {"stage": 2},
        "evaluation": {"weights": "ema"},
        "training": {"max_epochs": 6, "log_every": 11, "ema": {"decay": 0.9}},
    },
    "batch-norm": {
        "model": {"kind": "small_resnet18"},
        "precision": {"dtype": "autocast"},
        "zero": {"stage": 1},
    },
}
# Each in fp32 against plain PyTorch on a processor, and how far apart losses may be: relative, at
# the last step.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], float]] = {
    "torch-adamw": ({"kind": "adamw", "weight_decay": 0.01}, torch.optim.AdamW, 1e-3),
    "deepspeed-adamw": (
        {"kind": "adamw", "weight_decay": 0.01, "implementation": "deepspeed"},
        torch.optim.AdamW,
        1e-3,
    ),
    "lamb": ({"kind": "lamb", "lr": 0.01}, partial(lamb, lr=0.01), 1e-2),
    "lion": ({"kind": "lion", "lr": 3e-4}, partial(lion, lr=3e-4), 1e-2),
}
ORACLE_STEPS = 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        tmp_path_factory.mktemp("gpu"),
        {
            name: {
                "training": {"max_epochs": 6, "log_every": 11},
                "checkpoint": {"at_end": name.endswith(("z0", "z3"))},
                **sections,
            }
            for name, sections in CASES.items()
        },
    )


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        tmp_path_factory.mktemp("held"),
        {
            name: {
                "precision": {"dtype": "fp32", "matmul": "highest"},
                "optimizer": optimizer,
                "training": {"max_steps": ORACLE_STEPS, "log_every": 1},
                "evaluation": {"at_end": False},
                "checkpoint": {"at_end": False},
            }
            for name, (optimizer, *_) in OPTIMIZERS.items()
        },
    )


def train(folder: Path, cases: dict[str, dict[str, Any]]) -> Path:
    configs = [
        {
            "run": {"name": name, "output_dir": str(folder)},
            "batch": {"global_size": 120},
            "monitors": {"progress": "off"},
            **sections,
        }
        for name, sections in cases.items()
    ]
    train_cases_on_gpu(configs, folder=folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_it_learns(runs: Path, name: str) -> None:
    rows = read_metrics(runs / name)
    assert rows[-1]["eval/accuracy"] > 0.8
    environment = json.loads((runs / name / "environment.json").read_text(encoding="utf-8"))
    assert environment["accelerator"] == "cuda"
    assert environment["device_memory_bytes"] > 1 << 30


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_plain_pytorch(held: Path, name: str) -> None:
    _, make_optimizer, bound = OPTIMIZERS[name]
    expected = plain_losses(
        digit_batches(global_size=120, num_steps=ORACLE_STEPS), make_optimizer=make_optimizer
    )
    assert expected[-1] < 0.95 * expected[0], "it has moved"
    found = [*series(held / name, "train/loss").values()]
    assert found == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_reports_its_loss_scale(runs: Path, stage: int) -> None:
    rows = [row for row in read_metrics(runs / f"fp16-z{stage}") if "train/loss_scale" in row]
    assert rows
    assert all(row["train/loss_scale"] >= 1.0 for row in rows)


def test_device_memory_is_reported(runs: Path) -> None:
    assert read_metrics(runs / "bf16-z1")[0]["memory/device_peak_bytes"] > 0


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"kind": "adamw", "implementation": "torch"}},
        {},
        {"training": {"bad_steps": "skip"}},
        {"training": {"ema": {"decay": 0.9}}, "evaluation": {"weights": "ema", "at_end": False}},
        *({"precision": {"dtype": "bf16"}, "zero": {"stage": stage}} for stage in (0, 1, 2)),
    ],
    ids=["plain", "fused", "skips-bad-steps", "average", "bf16-z0", "bf16-z1", "bf16-z2"],
)
def test_nothing_waits_between_logged_points_and_the_phases_are_there(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    job = ROOT / "tests/jobs/no_waits.py"
    done = torchrun(
        job, str(tmp_path), json.dumps(sections), num_ranks=1, cwd=tmp_path, DS_ACCELERATOR="cuda"
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    hold_parts(tmp_path / "run", {"data", "copy", "forward", "backward", "optimizer"})
