from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from framework.models.sync_batch_norm import SyncBatchNorm, with_sync_batch_norm
from tests.launched import ROOT, run_ranks


@pytest.mark.slow
def test_two_ranks_are_one_batch_norm_over_the_joined_batch(tmp_path: Path) -> None:
    stated = run_ranks(ROOT / "tests/jobs/sync_batch_norm.py", num_ranks=2, cwd=tmp_path)
    assert stated.count(": same") == 12


def test_alone_it_is_ordinary_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3)
    ours = with_sync_batch_norm(nn.BatchNorm1d(3))
    values = torch.randn(8, 3)
    assert isinstance(ours, SyncBatchNorm)
    assert torch.equal(ours(values), plain(values))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


def test_options_shared_modules_and_missing_parts_are_kept() -> None:
    shared = nn.BatchNorm1d(3, eps=0.5, momentum=None, affine=False)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.BatchNorm1d(3, track_running_stats=False))
    ours = with_sync_batch_norm(model)
    assert ours[0] is ours[2]
    assert (ours[0].eps, ours[0].momentum, ours[0].weight) == (0.5, None, None)
    assert ours[3].running_mean is None
    assert not ours[3].track_running_stats
    already = with_sync_batch_norm(ours)
    assert already[0] is ours[0]
