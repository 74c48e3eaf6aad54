"""A step of ZeRO 1 and 2 in fewer passes over the gradients.

DeepSpeed's own (0.19.8, runtime/zero/stage_1_and_2.py `step`) looks for numbers that are not finite
gradient by gradient, copies each of them to doubles for the norm, adds up the norm of each
parameter group over the ranks by itself, joins gradients first and makes them fp32 then, and
multiplies them in a pass of its own; it reads up to three values from the device, and points every
weight at the place where it lies already. Here the norm is one reduction over the gradients as they
are, which is not finite where one of them is not; they are joined and made fp32 in one pass; and
torch's fused Adam divides them as it reads them. One value is read, where it decides. What a loss
counts is summed together with the norm, as `gradient_sums.py` sums it with the gradients.
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

from framework.engine.flat_sums import FlatSums, sum_flat
from framework.engine.gradient_divisor import clipping_divisor, dividing
from framework.engine.gradient_norm import norm_of


class FlatStep:
    """Stands in for `DeepSpeedZeroOptimizer.step`.

    It may divide by the count of all ranks instead of by their number.

    Attributes:
        ranks: how many ranks average their gradients.
        device: device of the gradients.
        divisor: divides losses before the counts are there: one for each sample.
        factor: by which the last step's gradients, summed and not averaged, were multiplied.
        sums: add gradients up over the ranks in place of DeepSpeed; None where it does.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, sums: FlatSums | None) -> None:
        optimizer = engine.optimizer
        self.sums = sums
        self._optimizer: DeepSpeedZeroOptimizer = optimizer
        self.device = engine.device
        self.ranks = torch.distributed.get_world_size(optimizer.dp_process_group)
        self.divisor = float(engine.train_batch_size())
        self.factor: Tensor | float = 1.0 / self.ranks
        self._count: Tensor | None = None
        self._is_divided = False
        averages = engine.gradient_average and engine.sequence_parallel_size == 1
        self._is_plain = averages and optimizer.model_parallel_group is None
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

    @property
    def divides(self) -> bool:
        """Check whether gradients may be divided by a count after they were averaged: not in half
        precision, and one rank alone knows it before.
        """
        return self._is_plain and self.ranks > 1 and self._optimizer.dtype == torch.float32

    def count(self, number: Tensor) -> None:
        """Add the count of a micro-batch, 0-d float32 on the device."""
        if self._count is None:
            self._count = number
        else:
            self._count = self._count + number

    def divide_now(self) -> None:
        """Divide the averaged gradients by what was counted, before the step does it while it reads
        them. Collective.
        """
        if self._count is None:
            return
        count = self._count.clone()
        self._count = None
        torch.distributed.all_reduce(count, group=self._optimizer.dp_process_group)
        self.factor = self._factor_of(count)
        self._is_divided = True
        for gradients in filter(None, self._optimizer.averaged_gradients.values()):
            torch._foreach_mul_(list(gradients), self.factor * self.ranks)

    def __call__(self, closure: object = None) -> None:
        """Step with the averaged gradients, and gather the weights. Collective."""
        optimizer = self._optimizer
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        norm = self._norm()
        is_divided = self._is_divided
        self._is_divided = False
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
        if isinstance(self.factor, Tensor) and not is_divided:
            by_count = 1.0 / (self.factor * self.ranks)
            divisor = by_count if divisor is None else divisor * by_count
        for number in range(len(optimizer.bit16_groups)):
            self._step_group(number, divisor)
        self._gather()

    def _norm(self) -> Tensor:
        """Return the norm of all ranks' gradients, divided by what was counted, still multiplied by
        the loss scale; infinity if one of them is not finite.
        """
        counted: list[Tensor] = []
        for number in range(len(self._optimizer.bit16_groups)):
            counted += self._counted(number)
        norm = norm_of(counted, device=self.device)
        if not self._is_divided:
            self.factor = 1.0 / self.ranks
        if self._count is not None:
            norm = self._norm_by_count(norm.square(), self._count)
            self._count = None
        elif self._sums:
            square = norm.square()
            for group in self._sums:
                torch.distributed.all_reduce(square, group=group)
            norm = square.sqrt()
        return norm.nan_to_num(torch.inf, posinf=torch.inf)

    def _norm_by_count(self, square: Tensor, count: Tensor) -> Tensor:
        """Return the norm of all ranks' gradients, divided by their count; note the factor."""
        pair = torch.stack((square, count))
        torch.distributed.all_reduce(pair, group=self._optimizer.dp_process_group)
        self.factor = self._factor_of(pair[1])
        return pair[0].sqrt() * (self.factor * self.ranks)

    def _factor_of(self, count: Tensor) -> Tensor:
        """Return the factor of summed gradients for the count of all ranks, 0-d."""
        # Losses were scaled by ranks / divisor (engine/step_batches.py). If nothing counts, the
        # gradients are zero, but for those that a model adds itself.
        factor = self.divisor / self.ranks / count
        return factor.nan_to_num_(1.0 / self.ranks, posinf=1.0 / self.ranks)

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
            if flat is None or flat.dtype == optimizer.dtype:
                # the same bits, with DeepSpeed's buckets and without
                return list(gradients)
            return [flat]
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
        flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
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


def shorten_flat_step(engine: deepspeed.DeepSpeedEngine, *, coalesces: bool) -> FlatStep | None:
    """Put a `FlatStep` in place, and the sums that it reads, and return it; `coalesces` is of
    `sum_flat`. Return None where the optimizer's gradients are on
    the host, of experts, not measured, or scaled by torch, or the engine measures DeepSpeed's own
    parts of the step.
    """
    optimizer: ZeROOptimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return None
    is_plain = optimizer.compute_grad_norm and not optimizer.has_moe_layers
    if optimizer.cpu_offload or not is_plain or engine.wall_clock_breakdown():
        return None
    if optimizer.torch_autocast_gradscaler is not None or optimizer.custom_loss_scaler:
        return None
    weights: list[Any] = [weight for group in optimizer.bit16_groups for weight in group]
    if any(getattr(weight, "use_muon", False) for weight in weights):
        return None
    step = FlatStep(engine, sum_flat(engine, coalesces=coalesces))
    optimizer.step = step
    return step
