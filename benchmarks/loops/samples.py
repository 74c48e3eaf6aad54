"""Random samples in memory, the same in every process."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def tokens(count: int, length: int, vocab_size: int) -> TensorDataset:
    """Return sequences, and the tokens that follow theirs."""
    drawing = torch.Generator().manual_seed(0)
    rows = torch.randint(vocab_size, (count, length + 1), generator=drawing)
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def pairs(count: int, length: int, vocab_size: int) -> TensorDataset:
    """Return sequences of two texts as BERT reads them (tokens, types, mask), and a class of
    two.
    """
    drawing = torch.Generator().manual_seed(0)
    rows = torch.randint(vocab_size, (count, length), generator=drawing)
    types = torch.zeros_like(rows)
    types[:, length // 2 :] = 1
    labels = torch.randint(2, (count,), generator=drawing)
    return TensorDataset(rows, types, torch.ones_like(rows), labels)
