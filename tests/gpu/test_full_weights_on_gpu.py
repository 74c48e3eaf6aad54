"""Whole weights, gradients and optimizer states on a CUDA device are those of plain PyTorch, and
the optimizer's copy on the host is set with the weight on the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import ROOT, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: copies on another device not run",
    ),
]

CASES = [
    *(f"fit:{stage}:{dtype}" for stage in (0, 2, 3) for dtype in ("bf16", "fp16")),
    "host:2:bf16",
    "host:3:bf16",
    "loop:3:bf16",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("full")
    script = ROOT / "tests/jobs/full_weights.py"
    done = torchrun(script, "out.json", *CASES, num_ranks=1, cwd=folder, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    values: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_and_set_is_plain_pytorchs(found: dict[str, Any], case: str) -> None:
    assert isinstance(found[case], float), found[case]
    assert found[case] < 2e-2
