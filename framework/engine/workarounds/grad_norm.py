"""The global gradient norm of fp32 training at ZeRO stage 0, which DeepSpeed up to 0.19.8 computes
and drops.

DeepSpeed 0.19.8's function (runtime/utils.py `clip_grad_norm_`) also takes two kernels for every
weight, averages over ranks a norm that is the same on all, refuses sparse gradients and waits for
the device twice in every step.

With a pipeline it counts the gradients of the first stage only and clips all stages by them; here
every stage is counted, and weights that several stages share are counted once. So are those that a
tensor group does not divide.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

from framework.engine.gradient_norm import norm_of


class KeptNorm:
    """Stands in for `DeepSpeedEngine.clip_fp32_gradients`, and keeps the norm before clipping."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, *, group: Any = None, counts_whole: bool = True
    ) -> None:
        """Measure from the next step on.

        Args:
            engine: the engine with the gradients.
            group: process group of ranks with other weights of the model, or None.
            counts_whole: whether this rank counts the weights that its tensor group does not
                divide.
        """
        self._counts_whole = counts_whole
        self._engine = engine
        self._group = group
        self._parameters = list(engine.module.parameters())
        self.norm: torch.Tensor | None = None

    def __call__(self) -> None:
        """Clip the gradients in place to the engine's limit. Collective within the group."""
        gradients, norm = self._gradients_and_norm()
        # A tensor, as torch computes number / tensor by the reciprocal, which rounds twice. `full`
        # fills on the device.
        limit = torch.full((), self._engine.gradient_clipping(), device=norm.device)
        if gradients:
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))

    def measure(self) -> torch.Tensor:
        """Measure the norm, and clip nothing. Collective within the group."""
        return self._gradients_and_norm()[1]

    def _gradients_and_norm(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return this rank's gradients and the norm of the whole model's, and keep the norm."""
        parameters = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [_numbers_of_gradient(parameter) for parameter in parameters]
        if self._group is None:
            norm = norm_of(gradients, device=self._engine.device)
        else:
            pairs = zip(parameters, gradients, strict=True)
            once = [gradient for parameter, gradient in pairs if self._counts(parameter)]
            square = norm_of(once, device=self._engine.device).square()
            torch.distributed.all_reduce(square, group=self._group)
            norm = square.sqrt()
        self.norm = norm
        return gradients, norm

    def _counts(self, parameter: torch.nn.Parameter) -> bool:
        """Check whether this rank counts a weight, and no other stage or rank of a tensor group
        does.
        """
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self._counts_whole or "split" in vars(parameter)

    def forget_gradients(self) -> None:
        """Stand in for `DeepSpeedEngine.zero_grad`, which walks through all modules in every
        step.
        """
        for parameter in self._parameters:
            parameter.grad = None


def _numbers_of_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a gradient; of a sparse one, in which equal rows are added up in place, the values."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


def norm_over_ranks(engine: deepspeed.DeepSpeedEngine) -> KeptNorm:
    """Return a measurement of the whole model's norm, where stages of a pipeline or tensor parts
    have weights of their own.
    """
    if engine.mpu is None:
        return KeptNorm(engine)
    # stages and tensor parts of the same samples
    group = engine.mpu.get_model_parallel_group()
    counts_whole = bwc_tensor_model_parallel_rank(engine.mpu) == 0
    return KeptNorm(engine, group=group, counts_whole=counts_whole)


def keep_norm(engine: deepspeed.DeepSpeedEngine) -> KeptNorm:
    """Put a `KeptNorm` in place of the engine's clipping and `zero_grad`, and return it."""
    kept = norm_over_ranks(engine)
    engine.clip_fp32_gradients = kept
    engine.zero_grad = kept.forget_gradients
    return kept
