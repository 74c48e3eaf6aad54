"""A step of half precision without ZeRO that reads no more from the device than it has to.

DeepSpeed's own (0.19.8, runtime/fp16/unfused_optimizer.py `step`, fused_optimizer.py) looks at each
gradient from the host, in bf16 as well, and makes, multiplies and copies back weight by weight.
Here one value is read where a step may be left out: in fp16, and in bf16 with
`precision.check_grad_overflow`. The norm is finite only where all gradients are.

Where its loss scale grows, DeepSpeed divides the gradients of that step by the new scale already,
and not by the one that they were multiplied by. Here they are divided by theirs.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from framework.engine.gradient_divisor import clipping_divisor, dividing
from framework.engine.workarounds.grad_norm import KeptNorm, norm_over_ranks


class HalfStep:
    """Stands in for `FP16_UnfusedOptimizer.step`."""

    def __init__(
        self, optimizer: FP16_UnfusedOptimizer, kept_norm: KeptNorm, *, refuses_infinite: bool
    ) -> None:
        """Stand in from the next step on.

        Args:
            optimizer: with the weights in half precision and their fp32 copies.
            kept_norm: measures the norm of the gradients in half precision.
            refuses_infinite: whether a step with gradients that are not finite is left out.
        """
        self._optimizer = optimizer
        self._kept_norm = kept_norm
        self._refuses_infinite = refuses_infinite
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        self._pairs: list[tuple[Any, Any]] = []
        for lows, copies in groups:
            self._pairs += zip(lows, copies, strict=True)

    def __call__(self, closure: object = None) -> bool:
        """Step, and return whether the step was left out. Collective if stages or tensor parts
        have weights of their own.
        """
        optimizer = self._optimizer
        norm = self._kept_norm.measure()
        optimizer.overflow = self._refuses_infinite and not torch.isfinite(norm).item()
        if optimizer.overflow:
            return bool(optimizer._skip_invalid_grad_norm())
        scale = float(optimizer.loss_scale)
        optimizer._global_grad_norm = norm / scale
        optimizer._update_scale(False)
        divisor = clipping_divisor(norm, limit=optimizer.clip_grad, scale=scale)
        with dividing(optimizer.optimizer, self._take_gradients(), divisor):
            optimizer.optimizer.step()
        copies = [copy for _, copy in self._pairs]
        for copy in copies:
            copy.grad = None
        with torch.no_grad():
            torch._foreach_copy_([low for low, _ in self._pairs], copies)
        return False

    def _take_gradients(self) -> list[Tensor]:
        """Give the fp32 copies their weights' gradients, zeros for weights without one, and return
        the numbers of all of them.
        """
        places: list[Tensor] = []
        gradients: list[Tensor] = []
        numbers: list[Tensor] = []
        for low, copy in self._pairs:
            if low.grad is None:
                copy.grad = torch.zeros_like(copy)
            elif low.grad.is_sparse:
                copy.grad = low.grad.to(copy.dtype)
                numbers.append(copy.grad._values())
            else:
                copy.grad = torch.empty_like(copy)
                places.append(copy.grad)
                gradients.append(low.grad)
        if places:
            torch._foreach_copy_(places, gradients)
        return numbers + places


def shorten_half_step(engine: deepspeed.DeepSpeedEngine) -> None:
    """Have an optimizer of half precision without ZeRO step in fewer passes, unless it steps
    experts.
    """
    optimizer = engine.optimizer
    if engine.has_moe_layers:
        return
    refuses_infinite = engine.fp16_enabled() or engine._config.bfloat16_config.check_grad_overflow
    if isinstance(optimizer, FP16_Optimizer):
        # DeepSpeed's step also leaves out one with a norm that is not finite.
        optimizer.overflow_checker.has_overflow = lambda weights: False
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        kept_norm = norm_over_ranks(engine)
        optimizer.step = HalfStep(optimizer, kept_norm, refuses_infinite=refuses_infinite)
