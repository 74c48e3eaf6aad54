"""Batch norm over the batches of all data-parallel ranks, on GPUs by torch's kernels and on CPUs by
ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that also takes tensors on the CPU, which torch's refuses.

    Input and output: (batch, channels, ...). Ranks may have batches of different sizes. In
    evaluation, without a process group and on one rank it is ordinary batch norm.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise with mean and variance over the batches of all ranks; collective in
        training.
        """
        is_synchronised = self.training and distributed.is_initialized()
        if input.device.type != "cpu" or not is_synchronised:
            output: Tensor = super().forward(input)
            return output
        if distributed.get_world_size(self._group()) == 1:
            # torch's synchronised one refuses tensors on the CPU there, too.
            return _BatchNorm.forward(self, input)
        return self._normalise_over_ranks(input)

    def _normalise_over_ranks(self, input: Tensor) -> Tensor:
        """Normalise a tensor on the CPU, and update the running statistics; two all-reduces.

        The mean comes first, then the variance around it: sums of squares would lose the variance
        beside a large mean.
        """
        self._check_input_dim(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        axes = [axis for axis in range(values.ndim) if axis != 1]
        # Shape of one number per channel, to be broadcast.
        shape = (1, -1) + (1,) * (values.ndim - 2)
        count = values.new_full((1,), values.numel() // values.shape[1])
        total = _SumOverRanks.apply(torch.cat((values.sum(axes), count)), self._group())
        sums = total[:-1]
        count = total[-1].detach()
        centred = values - (sums / count).view(shape)
        squares = _SumOverRanks.apply(centred.square().sum(axes), self._group())
        self._count_batch((sums / count).detach(), (squares / (count - 1)).detach())
        output: Tensor = centred * (squares / count + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _count_batch(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, if there are any, by a batch's mean and unbiased variance
        per channel.
        """
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            share = 1.0 / float(self.num_batches_tracked)
        else:
            share = self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - share).add_(value.to(running.dtype), alpha=share)

    def _group(self) -> Any:
        return self.process_group or distributed.group.WORLD


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks. The loss of the job is a sum over ranks, and so is the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _sum_over_ranks(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(gradient, ctx.group), None


def _sum_over_ranks(value: Tensor, group: Any) -> Tensor:
    total = value.clone()
    distributed.all_reduce(total, group=group)
    return total


def with_sync_batch_norm(model: nn.Module, *, process_group: Any = None) -> nn.Module:
    """Replace every batch norm in a model by one that is synchronised; weights, buffers and their
    names stay.

    Args:
        model: changed in place.
        process_group: the ranks that have different samples of the same batch; None: all ranks.

    Returns:
        The model; a new module where the model itself is a batch norm.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        # `named_children` would leave out a module that stands in the parent twice.
        for name, child in list(parent._modules.items()):
            if child is None or not _is_plain_batch_norm(child):
                continue
            if child not in replacements:
                replacements[child] = _synchronised(child, process_group)
            parent.add_module(name, replacements[child])
    if _is_plain_batch_norm(model):
        return _synchronised(model, process_group)
    return model


def _is_plain_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _synchronised(norm: Any, process_group: Any) -> SyncBatchNorm:
    """Return a synchronised batch norm with the same parameter objects, which ZeRO-3 may have
    partitioned already.
    """
    new = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        affine=False,
        track_running_stats=False,
        process_group=process_group,
    )
    new.affine = norm.affine
    new.track_running_stats = norm.track_running_stats
    for name, parameter in norm._parameters.items():
        new.register_parameter(name, parameter)
    for name, buffer in norm._buffers.items():
        new.register_buffer(name, buffer, persistent=name not in norm._non_persistent_buffers_set)
    return new.train(norm.training)
