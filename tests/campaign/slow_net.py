"""A model whose steps take as long as a test wants: DSF_STEP_SECONDS, which is no part of the run's
config; and which looks at a path in every step, that of DSF_STEP_LOOKS: a rank that finds something
there enters a collective alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn


class SlowNet(nn.Module):
    """Dropout, so that a resume must bring back random states; and enough weights that a save takes
    its time.
    """

    def __init__(self, hidden_size: int = 512) -> None:
        super().__init__()
        self._seconds = float(os.environ.get("DSF_STEP_SECONDS", "0.1"))
        self._looks = os.environ.get("DSF_STEP_LOOKS")
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden_size),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores; in training it takes its time."""
        if self.training:
            time.sleep(self._seconds)
            if self._looks and Path(self._looks).exists():
                torch.distributed.all_reduce(torch.ones(3))
        scores: torch.Tensor = self.layers(images)
        return scores
