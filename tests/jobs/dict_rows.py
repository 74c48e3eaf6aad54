"""Rows as Hugging Face's datasets give them, and models of transformers that compute a loss from
their labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.jobs.families import THEIRS

LENGTH, VOCABULARY = 12, 67


def model(family: str) -> nn.Module:
    """Of `tests.jobs.families`, drawn from seed 0, without dropout."""
    import transformers

    name, values = THEIRS[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    found: nn.Module = kind(kind.config_class(**values))
    return found.eval()  # trained in training mode all the same


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Token rows of unlike length, padded, with as many labels each; or a class per row."""

    def __init__(self, has_classes: bool = False) -> None:
        self.has_classes = has_classes

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        length = 3 + index % (LENGTH - 3)
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=draw)
        mask = (torch.arange(LENGTH) < length).long()
        labels = tokens % 5 if self.has_classes else tokens.masked_fill(mask == 0, -100)
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "labels": labels[0] if self.has_classes else labels,
        }
