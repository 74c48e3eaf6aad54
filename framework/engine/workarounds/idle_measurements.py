"""Work in every step for measurements that are not requested, and that a CPU cannot take.

DeepSpeed 0.19.8 goes through its empty lists of timers five times in a micro-batch, and marks
ranges for a profiler of GPUs. It also has torch look for NVIDIA's library on the disk
(`PYTORCH_NVML_BASED_CUDA_CHECK`) whenever torch is asked for a GPU, as torch's Adam does in every
step: without a GPU that takes 27 microseconds instead of one.
"""

from __future__ import annotations

import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import nvtx


def leave_out_measurements(engine: deepspeed.DeepSpeedEngine) -> None:
    """Leave out the measurements of an engine that are not requested."""
    if not engine.engine_timers.active_timers():
        engine._start_timers = _ignore
        engine._stop_timers = _ignore
    if get_accelerator()._name == "cpu" and not torch.cuda.is_available():
        nvtx.enable_nvtx = False
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def _ignore(timer_names: list[str]) -> None: ...
