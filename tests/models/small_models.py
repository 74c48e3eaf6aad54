"""Small models of every sort, for tests of what a config changes in a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from framework.recipes.language_models.bert import BERT
from framework.recipes.language_models.gpt import GPT

IDS = torch.randint(0, 11, (4, 64), generator=torch.Generator().manual_seed(0))


_GPT: dict[str, Any] = {
    "vocab_size": 11,
    "max_positions": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 64,
    "dropout": 0.1,
}


def gpt(**changes: Any) -> GPT:
    return GPT.of(**_GPT | changes)


def bert() -> nn.Module:
    return BERT.of(
        vocab_size=11, max_positions=64, hidden_size=32, num_layers=4, num_heads=4, mlp_size=64
    )


def with_dropout() -> nn.Module:
    parts = [
        part
        for _ in range(4)
        for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3))
    ]
    return nn.Sequential(*parts, nn.Linear(32, 1))


# Models with dropout, and what each takes.
MODELS: dict[str, Any] = {
    "gpt": (gpt, (IDS,)),
    "bert": (bert, (IDS, torch.zeros_like(IDS), torch.ones_like(IDS))),
    "sequential": (
        with_dropout,
        (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),),
    ),
}
