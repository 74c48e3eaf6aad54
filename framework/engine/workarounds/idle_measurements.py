"""Work in every step for measurements that nobody has asked for, and on a CPU nobody can take.

DeepSpeed 0.19.8 goes through its lists of timers five times in a micro-batch, empty as they are,
and marks ranges for a profiler of GPUs. And it has torch look for NVIDIA's library on the disk
(`PYTORCH_NVML_BASED_CUDA_CHECK`) whenever it is asked for a GPU, as torch's Adam does in every
step: without one that takes 27 microseconds instead of one.
"""

from __future__ import annotations

import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import nvtx


def leave_out_measurements(engine: deepspeed.DeepSpeedEngine) -> None:
    """Take away what measures nothing."""
    if not engine.engine_timers.active_timers():
        engine._start_timers = engine._stop_timers = _ignore
    if get_accelerator()._name == "cpu" and not torch.cuda.is_available():
        nvtx.enable_nvtx = False
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def _ignore(timer_names: list[str]) -> None: ...
