"""Trains cases as `run_cases.py` does, on processors that DeepSpeed takes for a device beside the
host where it divides the optimizer: `cpu:0`, which torch knows as another name of the same memory.
So sub-groups of weights are stepped in two parts, as with a GPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tests.jobs.run_cases import main


def name_device() -> None:
    """Let the part on the device be on `cpu:0`."""
    create = DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions

    def create_on_device(optimizer: Any) -> None:
        accelerator = get_accelerator()
        accelerator._name = "cpu:0"
        create(optimizer)
        accelerator._name = "cpu"

    DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions = create_on_device


if __name__ == "__main__":
    name_device()
    main()
    sys.stdout.flush()
    os._exit(0)
