"""A step of ZeRO 1 and 2 in fewer passes over the gradients.

DeepSpeed's own (0.19.8, runtime/zero/stage_1_and_2.py `step`) looks for numbers that are not finite
gradient by gradient, copies each of them to doubles for the norm, adds up the norm of each
parameter group over the ranks by itself, joins gradients first and makes them fp32 then, and
multiplies them in a pass of its own; it reads up to three values from the device, and points every
weight at the place where it lies already. Here the norm is one reduction over the gradients as they
are, which is not finite where one of them is not; they are joined and made fp32 in one pass; and
torch's fused Adam divides them as it reads them. One value is read, where it decides.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import (
    INITIAL_MICRO_STEP_ID,
    OPTIMIZER_ALLGATHER_TIMER,
    DeepSpeedZeroOptimizer,
)
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from framework.engine.gradient_divisor import clipping_divisor, dividing
from framework.engine.gradient_norm import norm_of


class FlatStep:
    """Stands in for `DeepSpeedZeroOptimizer.step`."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        # bf16 has the range of fp32: there DeepSpeed looks on request
        is_bf16 = optimizer.dtype == torch.bfloat16
        self._refuses_infinite = optimizer.check_grad_overflow or not is_bf16
        self._sums = [
            group
            for group in (optimizer.dp_process_group, optimizer.model_parallel_group)
            if group is not None and torch.distributed.get_world_size(group) > 1
        ]
        self._ranks = [
            torch.distributed.get_world_size(group) for group in optimizer.real_dp_process_group
        ]

    def __call__(self, closure: object = None) -> None:
        """Step with the averaged gradients, and gather the weights. Collective."""
        optimizer = self._optimizer
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        norm = self._norm()
        optimizer.overflow = False
        if self._refuses_infinite:
            optimizer.overflow = not torch.isfinite(norm).item()
        scale = float(optimizer.loss_scale)
        optimizer._update_scale(optimizer.overflow)
        if optimizer.overflow:
            self._drop_gradients()
            return
        optimizer._global_grad_norm = norm / scale
        divisor = clipping_divisor(norm, limit=optimizer.clip_grad, scale=scale)
        for number in range(len(optimizer.bit16_groups)):
            self._step_group(number, divisor)
        self._gather()

    def _norm(self) -> Tensor:
        """Return the norm of all ranks' gradients, still multiplied by the loss scale; infinity if
        one of them is not finite.
        """
        counted: list[Tensor] = []
        for number in range(len(self._optimizer.bit16_groups)):
            counted += self._counted(number)
        norm = norm_of(counted, device=self._device)
        if self._sums:
            square = norm.square()
            for group in self._sums:
                torch.distributed.all_reduce(square, group=group)
            norm = square.sqrt()
        return norm.nan_to_num(torch.inf, posinf=torch.inf)

    def _counted(self, number: int) -> list[Tensor]:
        """Return a group's gradients, without those that a rank of another stage or tensor part
        counts.
        """
        optimizer = self._optimizer
        gradients = optimizer.averaged_gradients[number]
        counts_all = optimizer.model_parallel_rank == 0
        weights = optimizer.params_in_partition[number]
        if counts_all and not any(
            getattr(weight, "ds_pipe_replicated", False) for weight in weights
        ):
            flat = getattr(gradients, "flat_partition", None)
            return list(gradients) if flat is None else [flat]
        # fillings lie between the gradients of weights
        of_weights = [
            gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)
        ]
        counted: list[Tensor] = []
        for gradient, weight in zip(of_weights, weights, strict=False):
            is_replicated = getattr(weight, "ds_pipe_replicated", False)
            if not is_replicated and (counts_all or is_model_parallel_parameter(weight)):
                counted.append(gradient)
        return counted

    def _drop_gradients(self) -> None:
        """Leave out the step, as DeepSpeed does after an overflow."""
        optimizer = self._optimizer
        optimizer._global_grad_norm = float("inf")
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        for number in optimizer.averaged_gradients:
            optimizer.averaged_gradients[number] = None
            optimizer.all_grad_tensors[number] = None

    def _step_group(self, number: int, divisor: Tensor | None) -> None:
        """Step one parameter group, and round this rank's share of it into the model's weights."""
        optimizer = self._optimizer
        copy = optimizer.single_partition_of_fp32_groups[number]
        copy.grad = self._flat_gradient(number, copy.dtype)
        optimizer.free_grad_in_param_list(optimizer.bit16_groups[number])
        optimizer._release_preflattened_grad_buffers(number)
        optimizer.averaged_gradients[number] = None
        optimizer.all_grad_tensors[number] = None
        with dividing(optimizer.optimizer, [copy.grad], divisor):
            optimizer._optimizer_step(number)
        copy.grad = None
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[number])
        optimizer.parallel_partitioned_bit16_groups[number][rank].data.copy_(copy.data)

    def _flat_gradient(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return the gradients of this rank's share of a group as one flat tensor."""
        gradients = self._optimizer.averaged_gradients[number]
        joined: Tensor | None = getattr(gradients, "flat_partition", None)
        if joined is not None:
            return joined.view(-1).to(dtype)
        if gradients[0].dtype == dtype:
            flat: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
            return flat
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
        pieces = torch.split(flat, sizes)
        places = [piece.view_as(one) for piece, one in zip(pieces, gradients, strict=True)]
        torch._foreach_copy_(places, gradients)
        return flat

    def _gather(self) -> None:
        """Gather the shares of all ranks into the weights, which lie in them."""
        optimizer = self._optimizer
        timer = optimizer.timers(OPTIMIZER_ALLGATHER_TIMER)
        timer.start()
        for number, group in enumerate(optimizer.real_dp_process_group):
            if self._ranks[number] > 1:
                rank = torch.distributed.get_rank(group)
                share = optimizer.parallel_partitioned_bit16_groups[number][rank]
                flat = optimizer.bit16_groups_flat[number]
                torch.distributed.all_gather_into_tensor(flat, share, group=group)
        timer.stop()


def shorten_flat_step(engine: deepspeed.DeepSpeedEngine) -> None:
    """Put a `FlatStep` in place, unless the optimizer's gradients are on the host, of experts, not
    measured, or scaled by torch, or the engine measures DeepSpeed's own parts of the step.
    """
    optimizer: ZeROOptimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return
    is_plain = optimizer.compute_grad_norm and not optimizer.has_moe_layers
    if optimizer.cpu_offload or not is_plain or engine.wall_clock_breakdown():
        return
    if optimizer.torch_autocast_gradscaler is not None or optimizer.custom_loss_scaler:
        return
    weights: list[Any] = [weight for group in optimizer.bit16_groups for weight in group]
    if any(getattr(weight, "use_muon", False) for weight in weights):
        return
    optimizer.step = FlatStep(optimizer, engine.device)
