"""A mixture: every step's samples, and so its losses, are those that its shares and orders say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from examples.mixture import sources
from framework.data.mixtures import pattern
from framework.data.order import epoch_order
from tests.launched import read_metrics, run_ranks, series
from tests.places import ROOT

pytestmark = pytest.mark.slow
STEPS, LANES = 45, 32


def test_its_losses_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    run_ranks(ROOT / "examples/mixture.py", str(STEPS), num_ranks=2, cwd=tmp_path)
    losses = series(tmp_path / "runs/mixture", "train/loss")
    parts, chosen = [part for _, part in sources()], pattern((3.0, 1.0)).tolist()
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = [[0, 0] for _ in range(LANES)]
    for step in range(STEPS):  # of every lane one sample
        batch = []
        for lane in range(LANES):
            part = chosen[(step + len(chosen) * lane // LANES) % len(chosen)]
            size = len(parts[part])
            epoch, place = divmod(taken[lane][part] * LANES + lane, size)
            taken[lane][part] += 1
            batch.append(
                parts[part][int(epoch_order(size, seed=part, epoch=epoch, shuffle=True)[place])]
            )
        assert sum(count[1] for count in taken) == 8 * (step + 1)
        optimizer.zero_grad()
        inputs, targets = (torch.stack(values) for values in zip(*batch, strict=True))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert losses[step + 1] == pytest.approx(loss.item(), rel=1e-4)
    assert read_metrics(tmp_path / "runs/mixture")[-1]["eval/accuracy"] > 0.8
