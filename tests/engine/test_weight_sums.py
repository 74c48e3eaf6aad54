"""Sums of bits show which weight was written."""

from __future__ import annotations

import pytest
import torch

from framework.engine import weight_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_show_which_weight_was_written(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(weight_sums, "_MOST_BLOCKS", 50)
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (300, 500, 4, 1196)]
    offsets = [0, 300, 800, 804]
    flat = torch.randn(2000).to(dtype)
    before = weight_sums.block_sums(flat)
    assert before.numel() == 50
    flat[350:360].mul_(2)
    blocks = (weight_sums.block_sums(flat) != before).nonzero().flatten().tolist()
    members = [
        (weight, weight.numel(), offset) for weight, offset in zip(weights, offsets, strict=True)
    ]
    assert [
        weight is weights[1] for weight in weight_sums.weights_in_blocks(members, blocks, flat)
    ] == [True]
