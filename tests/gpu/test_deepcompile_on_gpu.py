"""A model that DeepSpeed compiles has the losses of plain PyTorch on a CUDA device, at ZeRO 1 and 2,
with accumulation, and goes on after a resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import series, train_cases_on_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: DeepCompile takes CUDA alone",
    ),
]

STEPS, STOP = 20, 10
DEEP = {"backend": "deepcompile"}


def case(name: str, folder: Path, *, stage: int, **sections: Any) -> dict[str, Any]:
    training = {"max_steps": STEPS, "log_every": 1, "compile": False}
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 120, "accumulation_steps": 2},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "precision": {"dtype": "fp32", "matmul": "highest"},
        "monitors": {"progress": "off"},
        "zero": {"stage": stage},
        **sections,
        "training": training | sections.get("training", {}),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepcompile")
    cases = [case("plain", folder, stage=1)]
    for stage in (1, 2):
        cases.append(case(f"deep-{stage}", folder, stage=stage, training={"compile": DEEP}))
    half = {"compile": DEEP, "max_steps": STOP}
    cases.append(case("resumed", folder, stage=1, training=half))
    rest = {"resume": "auto"}
    cases.append(case("resumed", folder, stage=1, training={"compile": DEEP}, checkpoint=rest))
    train_cases_on_gpu(cases, folder=folder)
    return folder


@pytest.mark.parametrize("name", ["deep-1", "deep-2", "resumed"])
def test_losses_and_norms_are_those_of_the_run_as_written(runs: Path, name: str) -> None:
    for metric in ("train/loss", "train/grad_norm"):
        expected = series(runs / "plain", metric)
        found = series(runs / name, metric)
        assert [found[step] for step in sorted(found)][-STOP:] == pytest.approx(
            [expected[step] for step in sorted(expected)][-STOP:], rel=2e-3
        )
