"""Losses that a run refuses, models that it cannot train, and a model that leaves out padding of
its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

NUM_INPUTS, NUM_CLASSES, LENGTH, VOCABULARY = 6, 4, 8, 11


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points with a class each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        point = torch.randn(NUM_INPUTS, generator=draw)
        return point, point[:NUM_CLASSES].argmax()


def net() -> nn.Module:
    """Two layers, drawn from seed 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def frozen() -> nn.Module:
    """No weight is trained."""
    return net().requires_grad_(False)


class Detached(nn.Module):
    """Ends the graph in its forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, points: Tensor) -> Tensor:
        outputs: Tensor = self.net(points)
        return outputs.detach()


def errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """A share, which has no gradient."""
    return (outputs.argmax(1) != targets).float().mean()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum over the batch."""
    return -outputs.log_softmax(1).gather(1, targets[:, None]).sum()


class Padded(Dataset[dict[str, Tensor]]):
    """Rows of unlike length; labels are 0 on the padding, as in fairseq and old BERT code."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=draw)
        length = 2 + index % (LENGTH - 2)
        return {
            "tokens": tokens,
            "labels": tokens.roll(-1).masked_fill(torch.arange(LENGTH) >= length, 0),
        }


class OwnLoss(nn.Module):
    """Computes the mean loss of the labels that are not 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(tokens))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)}
