"""Gradients of ZeRO stage 0, summed over ranks during the backward pass, together with the counts
of the loss.

DeepSpeed's own sums (0.19.8, `DeepSpeedEngine.allreduce_gradients`) begin when the pass has ended,
wait for one bucket after the other and copy every gradient back. Here a bucket is sent as soon as
it is complete, as in torch's DDP (Li et al. 2020, section 3.2), and the gradients become views of
the sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import deepspeed
import torch
import torch.distributed
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter

from framework.errors import TrainingError
from framework.plan.flat_sums import DDP_BUCKET


class _Bucket:
    """Parameters of one type, with gradients that are sent together.

    Attributes:
        parameters: the parameters.
        missing: those without a gradient yet in this pass, in a bucket with hooks.
        without_gradient: those that were sent as zeros.
        flat: what was sent, and later the sums.
        sending: handle of the all-reduce.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self.without_gradient = set[Parameter]()
        self.flat: torch.Tensor | None = None
        self.sending: Any = None

    def send(self, group: Any, dtype: torch.dtype, count: torch.Tensor | None = None) -> None:
        """Take the gradients from their parameters and begin to add them up over the ranks, as
        zeros for parameters without one; a count is added up as the last number.
        """
        tensors = [_dense_gradient(parameter) for parameter in self.parameters]
        if count is not None:
            tensors.append(count.reshape(1))
        self.without_gradient = set()
        for parameter in self.parameters:
            if parameter.grad is None:
                self.without_gradient.add(parameter)
        flat = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        self.flat = flat.to(dtype)
        self.sending = torch.distributed.all_reduce(self.flat, group=group, async_op=True)
        for parameter in self.parameters:
            parameter.grad = None

    def receive(self) -> torch.Tensor:
        """Wait for the sums and return them. On a GPU only its stream waits, not the host."""
        assert self.flat is not None
        self.sending.wait()
        return self.flat

    def hand_out(self, factor: torch.Tensor | float) -> None:
        """Give the parameters their gradients, views of the sums times `factor`, and forget the
        sums.
        """
        assert self.flat is not None
        flat = self.flat.mul_(factor).to(self.parameters[0].dtype)
        views = _unflatten_dense_tensors(flat, self.parameters)  # type: ignore[no-untyped-call]
        for parameter, view in zip(self.parameters, views, strict=True):
            # A parameter that was frozen in mid-run has no gradient; one that was frozen for a part
            # of the step has the gradient of the rest.
            is_frozen = not parameter.requires_grad and parameter in self.without_gradient
            if is_frozen:
                parameter.grad = None
            else:
                parameter.grad = _as_laid_out(parameter, view)
        # a handle keeps the tensor that was sent
        self.flat = None
        self.sending = None


def _dense_gradient(parameter: Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient


def _as_laid_out(parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the memory layout of its parameter, such as `channels_last`, in which
    fused optimizers read it.
    """
    if parameter.is_contiguous():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class GradientSums:
    """Stands in for `DeepSpeedEngine.allreduce_gradients`; may divide by the count of all ranks
    instead of by their number.

    Attributes:
        ranks: how many ranks add their gradients.
        device: device of the gradients.
        divisor: divides losses before the counts are there: one for each sample. So gradients have
            about their final size in the backward pass, where a model may clip them itself.
        factor: by which the last step's sums were multiplied.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine = engine
        self._group = engine.seq_data_parallel_group
        self.ranks = torch.distributed.get_world_size(self._group)
        self.device = engine.device
        self.divisor = float(engine.train_batch_size())
        self.factor: torch.Tensor | float = 1.0 / self.ranks
        self._dtype = engine.communication_data_type
        self._count: torch.Tensor | None = None
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        self._num_hooked = 0
        self._pass: int | None = None  # torch's number of the backward pass
        # The first step shows whether a part of the model runs backward by itself (a checkpoint of
        # torch's reentrant kind): a weight may get a gradient from several such passes, and all
        # gradients are sent when the last one has ended.
        self._sends_early = False
        self._is_nested = False
        self._hooks: list[Any] = []
        self._cut_into_buckets()

    @property
    def divides(self) -> bool:
        """Check whether gradients may be divided by a count after they were added: not if they have
        a loss scale, or are in half precision.
        """
        if self._engine.fp16_enabled() or self._engine.torch_autocast_z0_gradscaler is not None:
            return False
        parameters = self._buckets[0].parameters
        return all(parameter.dtype == torch.float32 for parameter in parameters)

    def count(self, number: torch.Tensor) -> None:
        """Add the count of a micro-batch, 0-d float32 on the device, before its backward pass."""
        if self._count is None:
            self._count = number
        else:
            self._count = self._count + number

    def __call__(self, bucket_size: int | None = None) -> None:
        """Stand in for `allreduce_gradients` after a backward pass: at a step's last micro-batch
        wait for the sums and give them to the parameters (collective).

        Raises:
            TrainingError: a weight got another gradient after its first one was sent.
        """
        self._pass = None
        if self._engine.is_gradient_accumulation_boundary():
            self._refuse_late_gradients()
            for bucket in self._buckets[self._num_sent :]:
                self._send(bucket)
            sums = [bucket.receive() for bucket in self._buckets]
            self.factor = 1.0 / self.ranks
            if self._count is not None:
                # Losses were scaled by ranks / divisor (engine/step_batches.py). If nothing counts,
                # the sums are zero, but for gradients that a model adds itself.
                total = sums[0][-1]
                factor = self.divisor / self.ranks / total
                self.factor = factor.nan_to_num_(1.0 / self.ranks, posinf=1.0 / self.ranks)
            del sums
            for bucket in self._buckets:
                bucket.hand_out(self.factor)
            self._num_sent = 0
            self._count = None
            self._sends_early = not self._is_nested
        for bucket in self._buckets[: self._num_hooked]:
            bucket.missing = {
                parameter for parameter in bucket.parameters if parameter.requires_grad
            }

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _refuse_late_gradients(self) -> None:
        for bucket in self._buckets[: self._num_sent]:
            if any(parameter.grad is not None for parameter in bucket.parameters):
                raise TrainingError(
                    f"rank {torch.distributed.get_rank()}: a weight got a second gradient in one "
                    "backward pass, as no step before showed, and its first one was sent already: "
                    "call torch.utils.checkpoint.checkpoint with use_reentrant=False, or set "
                    "zero.stage: 1 [gradient-after-sum]",
                    is_of_one_rank=True,
                )

    def _cut_into_buckets(self) -> None:
        """Cut trained parameters into buckets, from the model's end, where gradients come first."""
        trainable = _trainable(self._engine.module)
        self._buckets = [_Bucket(parameters) for parameters in _cut(reversed(trainable))]
        # The last bucket is complete when the pass is over, and needs no hooks.
        for bucket in self._buckets[:-1]:
            for parameter in bucket.parameters:
                hook = partial(self._send_complete, bucket)
                register = cast(Any, parameter).register_post_accumulate_grad_hook
                self._hooks.append(register(hook))
        self._num_hooked = len(self._buckets) - 1

    def _send_complete(self, bucket: _Bucket, parameter: Parameter) -> None:
        """Note that a parameter of a bucket has its gradient, and at a step's last micro-batch send
        the buckets that are complete.
        """
        # a pass of the model's own, or of an evaluation
        if not self._engine._running_engine_backward:
            return
        current = torch._C._current_graph_task_id()
        self._is_nested |= self._pass not in (None, current)
        self._pass = current
        bucket.missing.discard(parameter)
        if bucket.missing or not self._sends_early or self._is_nested:
            return
        if not self._engine.is_gradient_accumulation_boundary():
            return
        # All ranks send in the order of buckets: else different buckets would be added up.
        while self._num_sent < self._num_hooked and not self._buckets[self._num_sent].missing:
            self._send(self._buckets[self._num_sent])

    def _send(self, bucket: _Bucket) -> None:
        """Begin the sums of the next bucket; the first one takes the count along."""
        count = None
        if self._num_sent == 0:
            count = self._count
        self._num_sent += 1
        with torch.no_grad():
            bucket.send(self._group, self._dtype, count)


def _trainable(module: torch.nn.Module) -> list[Parameter]:
    return [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.numel()
    ]


def _cut(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Cut parameters into lists of one type and at most `DDP_BUCKET` numbers, or one
    parameter.
    """
    buckets: list[list[Parameter]] = [[]]
    num_numbers = 0
    for parameter in parameters:
        is_full = num_numbers + parameter.numel() > DDP_BUCKET
        if buckets[-1] and (is_full or buckets[-1][-1].dtype != parameter.dtype):
            buckets.append([])
            num_numbers = 0
        buckets[-1].append(parameter)
        num_numbers += parameter.numel()
    return buckets


def sum_gradients(engine: deepspeed.DeepSpeedEngine) -> GradientSums | None:
    """Put `GradientSums` in place at stage 0 if all gradients are dense, of one type and averaged
    over all ranks, and leave out all sums if there is one rank. Return None for one rank, and if
    DeepSpeed's sums stay.
    """
    if not (_averages_plainly(engine) and _has_one_dense_type(engine)):
        return None
    if torch.distributed.get_world_size(engine.seq_data_parallel_group) == 1:
        engine.allreduce_gradients = partial(_fill_in_zeros, engine)
        return None
    sums = GradientSums(engine)
    engine.allreduce_gradients = sums
    return sums


def _has_one_dense_type(engine: deepspeed.DeepSpeedEngine) -> bool:
    dtypes = {parameter.dtype for parameter in _trainable(engine.module)}
    if len(dtypes) != 1 or engine.communication_data_type not in (torch.float32, *dtypes):
        return False
    return not any(getattr(module, "sparse", False) is True for module in engine.module.modules())


def _averages_plainly(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Check whether DeepSpeed would add all gradients over one group, and divide by its size."""
    if hasattr(engine.optimizer, "get_grads_for_reduction"):  # it keeps gradients of its own
        return False
    if engine.has_moe_layers or engine.sequence_parallel_size > 1:
        return False
    if engine.seq_data_parallel_group is None or not engine.gradient_average:
        return False
    return bool(engine.postscale_gradients()) and engine.gradient_predivide_factor() == 1.0


def _fill_in_zeros(engine: deepspeed.DeepSpeedEngine, bucket_size: int | None = None) -> None:
    """Stand in for `allreduce_gradients` on one rank: give zeros to parameters that took no part in
    the loss. DeepSpeed does so too, but copies all gradients.
    """
    if engine.is_gradient_accumulation_boundary():
        for parameter in engine.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
