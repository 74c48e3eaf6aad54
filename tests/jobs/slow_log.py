"""Trains where each write to a log takes long, and never waits for one by itself: slow_log.py
well|error|SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import framework
from framework.engine import distributed
from framework.errors import RunStopped
from framework.system import file_writer


class Digits:
    """Samples, one of which ends the run."""

    def __init__(self, end: str) -> None:
        self._end, self._num_read = end, 0

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self._num_read += 1
        if self._num_read == 70 and self._end == "error":
            raise ZeroDivisionError("at sample 70")
        if self._num_read == 70 and self._end == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.full((4,), float(index)), index % 2


def main() -> None:
    file_writer._MOMENT_SECONDS = 0.0  # type: ignore[misc]
    write = distributed._LogFile._write

    def slow(self: Any, line: bytes) -> None:
        time.sleep(0.02)
        write(self, line)

    distributed._LogFile._write = slow  # type: ignore[method-assign]
    config = {
        "run": {"name": "slow", "output_dir": "outputs"},
        "batch": {"global_size": 8},
        "data": {"random_samples": False},
        "training": {"max_steps": 40, "log_every": 1},
        "monitors": {"tensorboard": False, "progress": "off"},
    }
    model = torch.nn.Linear(4, 2)
    try:
        framework.fit(
            config,
            model=model,
            train_data=Digits(sys.argv[-1]),
            task=torch.nn.functional.cross_entropy,
        )
    except RunStopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
