"""The global gradient norm of fp32 training at ZeRO stage 0, which DeepSpeed up to 0.19.8 computes and drops.

DeepSpeed 0.19.8's function (runtime/utils.py `clip_grad_norm_`) also takes two kernels for every weight, averages over
ranks a norm that is the same on all, refuses sparse gradients and waits for the device twice in every step.

With a pipeline it counts the gradients of the first stage only and clips all stages by them; here every stage is
counted, and weights that several stages share are counted once.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed


class KeptNorm:
    """Stands in for `DeepSpeedEngine.clip_fp32_gradients`, and remembers the norm before clipping."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, stages: Any = None) -> None:
        """Take the engine whose gradients are clipped, and the process group of a pipeline's stages if it is one."""
        self._engine, self._stages = engine, stages
        self.norm: torch.Tensor | None = None

    def __call__(self) -> None:
        """Clip the gradients in place to the engine's limit. Collective in a pipeline."""
        parameters = [parameter for parameter in self._engine.module.parameters() if parameter.grad is not None]
        own = [parameter for parameter in parameters if not getattr(parameter, "ds_pipe_replicated", False)]
        norm = _norm(_dense(own if self._stages is not None else parameters), device=self._engine.device)
        if self._stages is not None:
            square = norm.square()
            torch.distributed.all_reduce(square, group=self._stages)
            norm = square.sqrt()
        self.norm = norm
        # A number divided by a tensor would be rounded twice: torch takes the reciprocal. `full` fills on the device.
        limit = torch.full((), self._engine.gradient_clipping(), device=norm.device)
        if parameters:
            torch._foreach_mul_(_dense(parameters), (limit / (norm + 1e-6)).clamp(max=1.0))


def _dense(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Gradients, of a sparse one its numbers."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]


def _norm(gradients: list[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)))
    return norm


def keep_norm(engine: deepspeed.DeepSpeedEngine, *, stages: Any = None) -> KeptNorm | None:
    """Put a `KeptNorm` in place where DeepSpeed would drop the norm; None where its optimizer keeps it."""
    if engine.zero_optimization_stage() != 0 or engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    kept = KeptNorm(engine, stages=stages)
    engine.clip_fp32_gradients = kept
    return kept
