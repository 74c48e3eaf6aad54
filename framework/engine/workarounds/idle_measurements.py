"""Work in every step for measurements that are not requested, and that a CPU cannot take.

DeepSpeed 0.19.8 goes through its empty lists of timers five times in a micro-batch, and marks
ranges for a profiler of GPUs. It also has torch look for NVIDIA's library on the disk
(`PYTORCH_NVML_BASED_CUDA_CHECK`) whenever torch is asked for a GPU, as torch's Adam does in every
step: without a GPU that takes 27 microseconds instead of one. ZeRO describes the memory of its
buckets for each weight, to show it to none; and in each backward pass it asks torch of each weight
whether the pass reaches it (`count_used_parameters_in_backward`), to know the pass's end where
torch could not call it then, which it can.
"""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import nvtx


def leave_out_measurements(engine: deepspeed.DeepSpeedEngine) -> None:
    """Leave out the measurements of an engine that are not requested."""
    if not engine.engine_timers.active_timers():
        engine._start_timers = _ignore
        engine._stop_timers = _ignore
    if isinstance(engine.optimizer, ZeROOptimizer):
        engine.optimizer.report_ipg_memory_usage = _ignore
        for module in (stage_1_and_2, stage3):
            # as many as there are: with torch's call of the end nothing waits for the count
            module.count_used_parameters_in_backward = len
    if get_accelerator()._name == "cpu" and not torch.cuda.is_available():
        nvtx.enable_nvtx = False
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def _ignore(*arguments: Any, **named: Any) -> None: ...
