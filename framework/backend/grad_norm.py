"""The global gradient norm of fp32 training at ZeRO stage 0, where DeepSpeed computes it and drops it.

With a pipeline its function (deepspeed/runtime/utils.py `clip_grad_norm_`) counts the gradients of the first stage only and
clips all stages by them; here every stage is counted, and weights that several stages share are counted once.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.utils import clip_grad_norm_


class KeptNorm:
    """Stands in for `DeepSpeedEngine.clip_fp32_gradients`, and remembers the norm before clipping."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, stages: Any = None) -> None:
        """Take the engine whose gradients are clipped, and the process group of a pipeline's stages if it is one."""
        self._engine, self._stages = engine, stages
        self.norm: torch.Tensor | None = None

    def __call__(self) -> None:
        """Clip the gradients in place to the engine's limit."""
        engine, limit = self._engine, self._engine.gradient_clipping()
        if self._stages is None:
            self.norm = clip_grad_norm_(parameters=engine.module.parameters(), max_norm=limit, mpu=engine.mpu)
            return
        parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        once = [parameter.grad for parameter in parameters if not getattr(parameter, "ds_pipe_replicated", False)]
        square = torch.nn.utils.get_total_norm(once).square() if once else torch.zeros((), device=engine.device)
        torch.distributed.all_reduce(square, group=self._stages)
        self.norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, self.norm)


def keep_norm(engine: deepspeed.DeepSpeedEngine, *, stages: Any = None) -> KeptNorm | None:
    """Put a `KeptNorm` in place where DeepSpeed would drop the norm; None where its optimizer keeps it."""
    if engine.zero_optimization_stage() != 0 or engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    kept = KeptNorm(engine, stages=stages)
    engine.clip_fp32_gradients = kept
    return kept
