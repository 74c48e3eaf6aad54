"""fp16 on a CPU: DeepSpeed's accelerator says that it cannot, torch computes it nevertheless,
slowly.

So that fp16 checkpoints are written by DeepSpeed's own optimizers where there is no GPU.
"""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from framework.plan.rules import base


def allow_fp16() -> None:
    """Make this process's accelerator accept fp16, and the plan believe it."""
    accelerator = get_accelerator()
    if accelerator.is_fp16_supported():
        return
    supported = [*accelerator.supported_dtypes(), torch.float16]
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: supported
    rows = base.LISTED[base.__name__]
    rows[:] = [rule for rule in rows if rule.__name__ != "fp16_on_cpu"]
