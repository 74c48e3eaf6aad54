"""Attention over sequences that the ranks of this job share, against attention over whole ones: for
each case the largest differences of the outputs and of the gradients on any rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from framework.engine.distributed import process_group, rank
from framework.models.packed_attention import attend_within_texts, packed_rows
from framework.models.sequence import SequenceGroup, attend
from tests.models.packed import ROWS, places_of

LENGTH = 16
Case = dict[str, Any]
# Heads of queries and keys, and what else differs.
CASES: dict[str, Case] = {
    "ulysses": {"heads": (4, 4)},
    "2 x 2": {"heads": (2, 2)},
    "2 x 2, grouped": {"heads": (6, 3)},
    "2 x 2, fewer keys than ranks": {"heads": (6, 1)},
    "ring": {"heads": (1, 1)},
    "ring, grouped": {"heads": (3, 1)},
    "all see all": {"heads": (2, 2), "is_causal": False},
    "padding": {"heads": (1, 1), "mask": "padding"},
    "padding at the begin, causal": {"heads": (2, 2), "mask": "left"},
    "values of another size": {"heads": (3, 1), "value_size": 5},
    "scaled": {"heads": (1, 1), "scale": 0.3},
    "bf16": {"heads": (2, 2), "dtype": "bfloat16"},
    "texts": {"heads": (2, 2), "texts": True},
    "texts, ulysses": {"heads": (4, 2), "texts": True},
    "texts, ring": {"heads": (3, 1), "texts": True},
    "texts, window": {"heads": (2, 1), "texts": True, "window": 4},
    "texts, window of one": {"heads": (1, 1), "texts": True, "window": 1},
    "texts, bf16": {"heads": (1, 1), "texts": True, "dtype": "bfloat16"},
}


def inputs_of(case: Case) -> list[Tensor]:
    """Queries, keys and values of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    query_heads, key_heads = case["heads"]
    sizes = ((query_heads, 8), (key_heads, 8), (key_heads, case.get("value_size", 8)))
    made = [
        torch.randn(len(ROWS), heads, LENGTH, size, generator=generator, dtype=torch.float64)
        for heads, size in sizes
    ]
    dtype = getattr(torch, case.get("dtype", "float64"))
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def mask_of(name: str) -> Tensor | None:
    """Keys that count: of the rows some end early, or begin late and are causal."""
    if not name:
        return None
    places = torch.arange(LENGTH)
    counts = torch.tensor([16, 3, 9, 13])[:, None]
    if name == "padding":
        return (places < counts)[:, None, None]
    is_token = places >= LENGTH - counts
    return is_token[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def mixed_of(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scale = case.get("scale")
    if case.get("texts"):
        rows = packed_rows(places_of(ROWS), length=query.shape[2])
        return attend_within_texts(query, key, value, rows, scale=scale, window=case.get("window"))
    mask = mask_of(case.get("mask", ""))
    is_causal = mask is None and case.get("is_causal", True)
    return attend(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)


def differences(case: Case, group: SequenceGroup) -> list[float]:
    """Return the largest difference of the output, and of each gradient, as a share of the largest
    number."""
    whole = inputs_of(case)
    expected = mixed_of(case, *whole)
    upper = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).to(expected.dtype)
    expected_gradients = torch.autograd.grad(expected, whole, upper)
    parts = [
        tensor.detach().chunk(group.size, 2)[group.rank].clone().requires_grad_()
        for tensor in whole
    ]
    with group.shared():
        mixed = mixed_of(case, *parts)
        gradients = torch.autograd.grad(mixed, parts, upper.chunk(group.size, 2)[group.rank])
    found: list[Tensor] = []
    for one, other in zip((mixed, *gradients), (expected, *expected_gradients), strict=True):
        part = other.chunk(group.size, 2)[group.rank]
        difference = (one.double() - part.double()).abs().max()
        # A gradient may be 0, as of queries that see themselves alone.
        found.append((difference / other.double().abs().max().clamp(min=1e-3)).detach())
    worst = torch.stack(found)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return worst.tolist()


def main(out: str) -> None:
    with process_group(None):
        everyone = torch.distributed.group.WORLD
        group = SequenceGroup(rank(), torch.distributed.get_world_size(), everyone)
        found = {name: differences(case, group) for name, case in CASES.items()}
        if rank() == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
