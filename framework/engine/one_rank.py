"""Gradients of ZeRO 1 and 2 on one rank: nothing is sent, and so nothing is copied to be sent.

DeepSpeed (0.19.8, runtime/zero/stage_1_and_2.py) copies each gradient into a bucket of
`reduce_bucket_size` numbers, adds the bucket up over one rank and copies each gradient out of it
again, from a hook of each weight. Here gradients stay where the backward pass has put them. Sums in
fp32 of gradients in half precision are added up as they arrive, as before.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch.distributed
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def keep_gradients_in_place(engine: deepspeed.DeepSpeedEngine) -> None:
    """Leave out buckets and sums, if the optimizer of an engine has one rank.

    Gradients on the host, of experts and of a pipeline's stage stay with DeepSpeed.
    """
    optimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer or not is_alone(engine):
        return
    if optimizer.cpu_offload or optimizer.has_moe_layers or engine.pipeline_parallelism:
        return
    optimizer.setup_buckets = _nothing
    optimizer.reduce_ipg_grads = _nothing
    numbers = range(len(optimizer.bit16_groups))
    if any(optimizer._use_compact_grad_partition_buffer(number) for number in numbers):
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = _Sums(optimizer).add
        return
    optimizer.reduce_independent_p_g_buckets_and_remove_grads = _nothing
    # `DeepSpeedEngine.backward` ends its pass by itself, and asks for no hook
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks = []


def is_alone(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Check whether gradients are averaged over no other rank."""
    optimizer = engine.optimizer
    groups = [optimizer.dp_process_group, *optimizer.real_dp_process_group]
    return all(torch.distributed.get_world_size(group) == 1 for group in groups)


def _nothing(*arguments: Any, **named: Any) -> None:
    """Stand in for what one rank does not need."""


class _Sums:
    """Adds gradients to the fp32 sums of an optimizer's groups (`gradient_accumulation_dtype`)."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        self._optimizer = optimizer

    def add(self, weight: torch.nn.Parameter, number: int) -> None:
        """Add the gradient of a weight in a group, and drop it."""
        optimizer = self._optimizer
        gradient = optimizer.get_gradient_for_reduction(weight)
        if gradient is None or not weight.numel() or not getattr(weight, "ds_grad_is_ready", True):
            return
        place = optimizer._get_compact_grad_partition_slice(
            number, 0, optimizer.get_param_id(weight), weight.numel()
        )
        with torch.no_grad():
            place.view_as(weight).add_(gradient)
        optimizer.clear_grad_attribute(weight)
