"""The global gradient norm of fp32 training at ZeRO stage 0, which DeepSpeed up to 0.19.8 computes and drops.

Its function (deepspeed/runtime/utils.py `clip_grad_norm_`) also copies two numbers from the host in every step, and
waits for the device each time. What stands here has its arithmetic, to the bit, and waits for nothing.

With a pipeline DeepSpeed counts the gradients of the first stage only and clips all stages by them; here every stage is
counted, and weights that several stages share are counted once.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import groups


class KeptNorm:
    """Stands in for `DeepSpeedEngine.clip_fp32_gradients`, and remembers the norm before clipping."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, stages: Any = None) -> None:
        """Take the engine whose gradients are clipped, and the process group of a pipeline's stages if it is one."""
        self._engine, self._stages = engine, stages
        self.norm: torch.Tensor | None = None

    def __call__(self) -> None:
        """Clip the gradients in place to the engine's limit."""
        engine, limit = self._engine, self._engine.gradient_clipping()
        parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        if self._stages is None:
            self.norm = _clip([parameter.grad for parameter in parameters], limit, device=engine.device)
            return
        once = [parameter.grad for parameter in parameters if not getattr(parameter, "ds_pipe_replicated", False)]
        square = torch.nn.utils.get_total_norm(once).square() if once else torch.zeros((), device=engine.device)
        torch.distributed.all_reduce(square, group=self._stages)
        self.norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, self.norm)


def _clip(gradients: list[torch.Tensor], limit: float, *, device: torch.device) -> torch.Tensor:
    """Scale the gradients down to the limit; returns their norm before, the mean over ranks. Collective."""
    norms = [gradient.float().norm(2.0) for gradient in gradients] or [torch.zeros((), device=device)]
    everyone = groups._get_data_parallel_group()
    norm = torch.stack(norms).pow(2.0).sum().pow(0.5) / float(deepspeed.comm.get_world_size(group=everyone))
    deepspeed.comm.all_reduce(norm, group=everyone)
    # A number divided by a tensor would be rounded twice: torch takes the reciprocal. `full` fills on the device.
    coefficient = (torch.full((1,), limit, device=norm.device) / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.view(gradient.shape or 1).mul_(coefficient)  # seen as a vector, where it has no dimension
    return norm


def keep_norm(engine: deepspeed.DeepSpeedEngine, *, stages: Any = None) -> KeptNorm | None:
    """Put a `KeptNorm` in place where DeepSpeed would drop the norm; None where its optimizer keeps it."""
    if engine.zero_optimization_stage() != 0 or engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    kept = KeptNorm(engine, stages=stages)
    engine.clip_fp32_gradients = kept
    return kept
