"""Metrics over all samples of a run on a CUDA device, against one process on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: copies from the device and its states not run",
    ),
]


def test_are_those_of_the_processor(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    from tests.engine.test_gathered_metrics import case, of_one_process
    from tests.launched import read_metrics, train_cases_on_gpu

    precision = {"dtype": "fp32", "matmul": "highest"}
    train_cases_on_gpu([case(tmp_path, "gpu", precision=precision)], folder=tmp_path)
    last = read_metrics(tmp_path / "gpu")[-1]
    for metric, value in of_one_process(tmp_path / "gpu", "all").items():
        if "confusion" not in metric:
            assert last[f"eval/all/{metric}"] == pytest.approx(float(value), abs=1e-5), metric
