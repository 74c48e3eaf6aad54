"""What fails on one rank alone, in the ways that real devices and real data do: named by import
path in test configs.
"""

from __future__ import annotations

import os
import signal

import torch
from torch.utils.data import Dataset, TensorDataset

from framework.errors import ConfigError, Problem, TrainingError

# The message of an 80 GB device.
NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB is "
    "free. Including "
    "non-PyTorch memory, this process has 78.08 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by "
    "PyTorch."
)


def rows() -> TensorDataset:
    return TensorDataset(torch.ones(64, 3), torch.zeros(64, dtype=torch.long))


def loss_without_memory(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """On rank 1: in training, or with FAILS=evaluation in evaluation."""
    if os.environ["RANK"] == "1" and torch.is_grad_enabled() is (
        os.environ.get("FAILS") != "evaluation"
    ):
        raise torch.OutOfMemoryError(NO_MEMORY)
    return torch.nn.functional.cross_entropy(outputs, targets)


class Unreadable(Dataset[tuple[torch.Tensor, int]]):
    """A sample that one rank meets, or that all meet, cannot be read."""

    def __init__(self, how: str, rank: str) -> None:
        self._how, self._rank = how, rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._rank in ("all", os.environ["RANK"]):
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "problem":
                raise ConfigError(
                    Problem(
                        kind="dataset-torn", key="data.root", value="there", reason="it is torn"
                    )
                )
            try:
                raise OSError("image file is truncated")
            except OSError as error:
                raise TrainingError(
                    "there/dog/7.jpg: cannot be read as an image; replace it [image-damaged]"
                ) from error
        return torch.ones(3), 0


def unreadable(how: str = "image", rank: str = "1") -> Unreadable:
    return Unreadable(how, rank)


def unreadable_in_evaluation(
    how: str = "image", rank: str = "1"
) -> tuple[TensorDataset, Unreadable]:
    return rows(), Unreadable(how, rank)
