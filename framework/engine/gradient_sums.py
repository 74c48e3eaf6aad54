"""Gradients of ZeRO stage 0, summed over ranks while the backward pass goes on, together with what the loss counts.

DeepSpeed's own sums (0.19.8, `DeepSpeedEngine.allreduce_gradients`) begin when the pass has ended, wait for one bucket
after the other and copy every gradient back. Here a bucket is sent as soon as it is complete, as in torch's DDP (Li et
al. 2020, section 3.2), and the gradients become views of what has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from torch.nn import Parameter

NOTHING: Final = 1e-30  # less than any count, and its reciprocal a float
_BUCKET_NUMBERS: Final = 25 * 2**20 // 4  # 25 MiB of float32, as DDP


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self.flat: torch.Tensor | None = None
        self.sending: Any = None
        self.grew_later = False

    def send(self, group: Any, dtype: torch.dtype, *further: torch.Tensor) -> None:
        """Take the gradients from their parameters and begin to add them up; what got none counts as zeros."""
        gradients = [_flat_gradient(parameter) for parameter in self.parameters]
        self.flat = torch.cat([*gradients, *further]).to(dtype)
        self.sending = torch.distributed.all_reduce(self.flat, group=group, async_op=True)
        for parameter in self.parameters:
            parameter.grad = None

    def receive(self, group: Any) -> torch.Tensor:
        """Wait for the sums, on a GPU only in the order of its work."""
        assert self.flat is not None
        self.sending.wait()
        if self.grew_later:  # a checkpointed part of the model that is used twice runs backward twice
            later = torch.cat([_flat_gradient(parameter) for parameter in self.parameters]).to(self.flat)
            torch.distributed.all_reduce(later, group=group)
            self.flat[: later.numel()] += later
        return self.flat

    def hand_out(self, factor: torch.Tensor | float) -> None:
        """Give the parameters their gradients, as views, and forget the sums."""
        assert self.flat is not None
        flat = self.flat.mul_(factor).to(self.parameters[0].dtype)
        sizes = [parameter.numel() for parameter in self.parameters]
        views = torch.split(flat, [*sizes, flat.numel() - sum(sizes)])
        for parameter, view in zip(self.parameters, views, strict=False):
            parameter.grad = view.view(parameter.shape) if parameter.requires_grad else None
        self.flat, self.sending, self.grew_later = None, None, False  # a handle holds what was sent


def _flat_gradient(parameter: Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)


class GradientSums:
    """Stands in for `DeepSpeedEngine.allreduce_gradients`; may divide by what the ranks count instead of by ranks."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine, self._group = engine, engine.seq_data_parallel_group
        self.ranks, self.device = torch.distributed.get_world_size(self._group), engine.device
        # Divides losses before the counts are there: one for each sample. So gradients have their right size
        # in the backward pass as well, where a model may clip them itself.
        self.divisor = float(engine.train_batch_size())
        self._dtype = engine.communication_data_type
        self._count: torch.Tensor | None = None
        self.factor: torch.Tensor | float = 1.0 / self.ranks  # of the last step's sums
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        self._frozen = list(engine.module.parameters())
        self._add_trainable()

    @property
    def divides(self) -> bool:
        """Whether gradients may be divided by a count after they were added: not those that are scaled, or short."""
        has_scale = self._engine.fp16_enabled() or self._engine.torch_autocast_z0_gradscaler is not None
        return not has_scale and all(one.dtype == torch.float32 for one in self._buckets[0].parameters)

    def count(self, number: torch.Tensor) -> None:
        """Add what a micro-batch counts, 0-d float32 on the device, before its backward pass."""
        self._count = number if self._count is None else self._count + number

    def __call__(self, bucket_size: int | None = None) -> None:
        """End the sums of a step. Collective at the end of an accumulation."""
        if self._engine.is_gradient_accumulation_boundary():
            self._add_trainable()
            for bucket in self._buckets[self._num_sent :]:
                self._send(bucket)
            first, *_ = [bucket.receive(self._group) for bucket in self._buckets]
            self.factor = 1.0 / self.ranks
            if self._count is not None:
                # Where nothing counts the sums are zero as well.
                self.factor = self.divisor / self.ranks / first[-1].clamp(min=NOTHING)
            for bucket in self._buckets:
                bucket.hand_out(self.factor)
            self._num_sent, self._count = 0, None
        for bucket in self._buckets:
            bucket.missing = {parameter for parameter in bucket.parameters if parameter.requires_grad}

    def _add_trainable(self) -> None:
        """Cut what became trainable into buckets, from the model's end, where gradients come first."""
        trainable = [parameter for parameter in self._frozen if parameter.requires_grad and parameter.numel()]
        if not trainable:
            return
        known = set(trainable)
        self._frozen = [parameter for parameter in self._frozen if parameter not in known]
        for parameters in _cut(reversed(trainable)):
            bucket = _Bucket(parameters)
            self._buckets.append(bucket)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))  # type: ignore[no-untyped-call]

    def _arrived(self, bucket: _Bucket, parameter: Parameter) -> None:
        if parameter not in bucket.missing:
            bucket.grew_later |= bucket.flat is not None
            return
        bucket.missing.remove(parameter)
        if bucket.missing or not self._engine.is_gradient_accumulation_boundary():
            return
        # In one order on all ranks: another one would add other buckets to each other.
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._send(self._buckets[self._num_sent])

    def _send(self, bucket: _Bucket) -> None:
        counted = () if self._num_sent or self._count is None else (self._count.reshape(1),)
        self._num_sent += 1
        with torch.no_grad():
            bucket.send(self._group, self._dtype, *counted)


def _cut(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    buckets: list[list[Parameter]] = [[]]
    num_numbers = 0
    for parameter in parameters:
        if buckets[-1] and num_numbers + parameter.numel() > _BUCKET_NUMBERS:
            buckets.append([])
            num_numbers = 0
        buckets[-1].append(parameter)
        num_numbers += parameter.numel()
    return buckets


def sum_gradients(engine: deepspeed.DeepSpeedEngine) -> GradientSums | None:
    """Put `GradientSums` in place where all gradients are dense, of one type and added by all ranks alike, and nothing
    at all where there is one rank; None where DeepSpeed's way stays, and for one rank.
    """
    trainable = [parameter for parameter in engine.module.parameters() if parameter.requires_grad and parameter.numel()]
    dtypes = {parameter.dtype for parameter in trainable}
    is_plain = (
        engine.zero_optimization_stage() == 0
        and not hasattr(engine.optimizer, "get_grads_for_reduction")  # it keeps gradients of its own
        and len(dtypes) == 1
        and engine.communication_data_type in (torch.float32, *dtypes)
        and engine.gradient_average
        and engine.postscale_gradients()
        and engine.gradient_predivide_factor() == 1.0
        and not (engine.has_moe_layers or engine.sequence_parallel_size > 1)
        and not any(getattr(module, "sparse", False) for module in engine.module.modules())
        and engine.seq_data_parallel_group is not None
    )
    if not is_plain:
        return None
    if torch.distributed.get_world_size(engine.seq_data_parallel_group) == 1:
        engine.allreduce_gradients = partial(_complete, engine)
        return None
    sums = GradientSums(engine)
    engine.allreduce_gradients = sums
    return sums


def _complete(engine: deepspeed.DeepSpeedEngine, bucket_size: int | None = None) -> None:
    """Give zeros to what took no part in the loss, as DeepSpeed does, which copies all gradients for it."""
    if engine.is_gradient_accumulation_boundary():
        for parameter in engine.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
