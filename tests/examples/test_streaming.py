"""Streamed rows: the losses of plain PyTorch, over a stop and on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.launched import run_ranks, series
from tests.places import ROOT

pytestmark = pytest.mark.slow


def test_its_losses_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows, losses = tmp_path / "rows", {}
    for steps, ranks in ((20, 1), (40, 2)):
        run_ranks(
            ROOT / "examples/streaming.py", str(rows), str(steps), num_ranks=ranks, cwd=tmp_path
        )
        losses |= series(tmp_path / "runs/streaming", "train/loss")
    lanes = [
        [
            json.loads(line)
            for line in (rows / f"part{number}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for number in range(8)
    ]
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        chosen = [lane[(4 * step + number) % len(lane)] for lane in lanes for number in range(4)]
        optimizer.zero_grad()
        outputs = model(torch.tensor([row["x"] for row in chosen]))
        loss = nn.functional.cross_entropy(outputs, torch.tensor([row["y"] for row in chosen]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert losses[step + 1] == pytest.approx(loss.item(), rel=1e-4)
