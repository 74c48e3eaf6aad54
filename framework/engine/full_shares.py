"""Where this rank's numbers of a weight lie: of the weight itself, its gradient, and the states of
the optimizer, at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.nn import Parameter

from framework.checkpoint.state.optimizer_shards import OptimizerViews, ParameterPiece
from framework.checkpoint.state.swapped import swapped_in
from framework.engine.spread_weights import rank_share, set_share


@dataclass(frozen=True)
class Share:
    """This rank's numbers of a tensor.

    Attributes:
        start: where they begin in the flattened tensor, or in this rank's part of it.
        values: the numbers, writable; of any shape.
    """

    start: int
    values: Tensor


class RankShares:
    """This rank's numbers of the tensors of one engine. Each method that returns a `Share` returns
    None where this rank steps none of the weight.

    Raises:
        LookupError: there is no such tensor now, with the reason.
    """

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, *, has_gradients: Callable[[], bool]
    ) -> None:
        """Take an engine; `has_gradients` returns whether the gradients of a step are complete."""
        self._engine = engine
        self._optimizer = engine.optimizer
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._views = OptimizerViews(engine, {})
        self._has_gradients = has_gradients

    def weight(self, weight: Parameter) -> Share | None:
        """Return this rank's numbers of a weight: those that are stepped, with what code of the run
        has written into the module since; of a frozen weight the module's.
        """
        if not weight.is_floating_point():
            raise LookupError(f"it is of {weight.dtype}, which no optimizer steps")
        piece = self._views.piece_of(weight)
        if piece is None:
            if self._views.is_stepped(weight):
                return None
            return _module_share(weight)
        stepped = _numbers_of(piece.stepped.data, piece.offset, piece.num)
        low = _module_share(weight, piece)
        if low is None or low.values.data_ptr() == stepped.data_ptr():
            return Share(piece.start, stepped)
        rounded = low.values.reshape(stepped.shape).to(stepped.device)
        is_kept = stepped.to(rounded.dtype) == rounded
        return Share(piece.start, torch.where(is_kept, stepped, rounded.to(stepped.dtype)))

    def stepped(self, weight: Any) -> Share | None:
        """Return this rank's numbers of a weight that are to be set before the module's are."""
        if not weight.is_floating_point():
            raise LookupError(f"it is of {weight.dtype}, which no optimizer steps")
        if hasattr(weight, "ds_id"):
            kept = weight.ds_tensor
            is_plain = weight.ds_secondary_tensor is None and not hasattr(kept, "ds_quant_scale")
            if not is_plain or kept.numel() < rank_share(weight)[1]:
                raise LookupError(
                    "DeepSpeed keeps it a second time, quantized or in a file; leave out "
                    "zero_hpz_partition_size, zero_quantized_weights and zero.offload_param"
                )
        piece = self._views.piece_of(weight)
        if piece is None:
            return None
        return Share(piece.start, _numbers_of(piece.stepped.data, piece.offset, piece.num))

    def set_module(self, weight: Any, part: Tensor) -> None:
        """Write a weight's part into the module."""
        if not hasattr(weight, "ds_id"):
            weight.data.copy_(part.view(weight.shape))
            return
        start, count = rank_share(weight)
        set_share(weight, part.view(-1)[start : start + count])
        if weight.ds_status is ZeroParamStatus.AVAILABLE:
            weight.data.copy_(part.view(weight.shape))

    def gradient(self, weight: Parameter) -> Share | None:
        """Return this rank's numbers of a weight's gradient, multiplied by the loss scale."""
        if not self._has_gradients():
            raise LookupError(
                "gradients are complete between the last backward pass of a step and the step: in "
                "on_gradients of a callback, or before step() of a loop of your own"
            )
        if not weight.requires_grad or not self._views.is_stepped(weight):
            raise LookupError("it is not trained, and has no gradient")
        optimizer = self._optimizer
        if hasattr(optimizer, "fp32_groups_gradients"):  # whole on every rank
            for group, gradients in zip(
                optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True
            ):
                for member, gradient in zip(group, gradients, strict=True):
                    if member is weight:
                        return Share(0, gradient)
        if not hasattr(optimizer, "averaged_gradients"):
            return Share(0, _plain_gradient(weight))
        piece = self._views.piece_of(weight)
        if piece is None:
            return None
        return Share(piece.start, self._flat_gradient(piece))

    def _flat_gradient(self, piece: ParameterPiece) -> Tensor:
        """Return the numbers of a piece's gradient at ZeRO 1 to 3."""
        optimizer = self._optimizer
        is_on_host = getattr(optimizer, "offload_optimizer", getattr(optimizer, "cpu_offload", 0))
        if is_on_host and piece.stepped.grad is not None:
            return _numbers_of(piece.stepped.grad, piece.offset, piece.num)
        gradients = optimizer.averaged_gradients.get(self._number_of(piece))
        if gradients is None:
            raise LookupError("DeepSpeed has taken its gradient already")
        offset = piece.offset
        for gradient in gradients:
            if offset < gradient.numel():
                return _numbers_of(gradient, offset, piece.num)
            offset -= gradient.numel()
        raise LookupError("DeepSpeed keeps no gradient of it")

    def _number_of(self, piece: ParameterPiece) -> int:
        """Return the number of the group that a piece lies in, at ZeRO 1 to 3."""
        optimizer = self._optimizer
        flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)
        if flats is None:
            flats = optimizer.single_partition_of_fp32_groups
        return next(number for number, flat in enumerate(flats) if flat is piece.stepped)

    def note_norm(self, weight: Parameter, share: Share | None) -> None:
        """Have DeepSpeed clip by the gradient that was set: of gradients on the host it keeps the
        norms (`norm_for_param_grads`).
        """
        norms = getattr(self._optimizer, "norm_for_param_grads", None)
        if not norms or share is None:
            return
        key = self._optimizer.get_param_id(weight)
        if key in norms:
            norms[key] = share.values.to(norms[key]).norm(2)

    def state(self, weight: Parameter, key: str) -> Share | None:
        """Return this rank's numbers of a state of the optimizer."""
        if not self._views.is_stepped(weight):
            raise LookupError("it is not trained, and the optimizer keeps nothing of it")
        piece = self._views.piece_of(weight)
        if piece is None:
            return None
        state = self._base.state.get(piece.stepped, {})
        known = [
            name
            for name, tensor in state.items()
            if type(tensor) in (Tensor, Parameter)
            and tensor.is_floating_point()
            and tensor.numel() == piece.stepped.numel()
        ]
        if key not in known:
            if known:
                reason = f"of every number the optimizer keeps {', '.join(known)}"
            else:
                reason = "the optimizer keeps nothing of every number; before its first step none"
            raise LookupError(reason)
        return Share(piece.start, _numbers_of(state[key], piece.offset, piece.num))

    def loss_scale(self) -> float:
        """Return the factor by which gradients were multiplied in the backward pass."""
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        if scaler is None:
            scaler = getattr(self._optimizer, "torch_autocast_gradscaler", None)
        if scaler is not None:
            return float(scaler.get_scale())
        return float(getattr(self._optimizer, "loss_scale", 1.0) or 1.0)

    @contextmanager
    def in_memory(
        self, weight: Parameter, *, writes: bool = False, gradients: bool = False
    ) -> Iterator[None]:
        """Hold what is stepped for a weight in memory within the block, if it lies in a file."""
        optimizer = self._optimizer
        piece = None
        if getattr(optimizer, "swap_optimizer", False):
            piece = self._views.piece_of(weight)
        if piece is None:
            yield
            return
        number = self._number_of(piece)
        with swapped_in(optimizer, number, writes=writes, gradients=gradients):
            yield


def _numbers_of(tensor: Tensor, offset: int, num: int) -> Tensor:
    """Return numbers of a flattened tensor, as a view."""
    if offset == 0 and num == tensor.numel():
        return tensor
    return tensor.view(-1).narrow(0, offset, num)


def _plain_gradient(weight: Parameter) -> Tensor:
    """Return a weight's gradient at ZeRO 0; one without any gets zeros, as in the step."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    if weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
    return weight.grad


def _module_share(weight: Any, piece: ParameterPiece | None = None) -> Share | None:
    """Return the numbers of a weight in the module that this rank keeps: of a piece, or all that it
    has. None if the module's are not to be compared: DeepSpeed has rounded them to fewer
    bits, or they lie in a file.
    """
    if not hasattr(weight, "ds_id"):
        if piece is None:
            return Share(0, weight.data)
        flat = weight.data.reshape(-1)
        return Share(piece.start, flat.narrow(0, piece.start, piece.num))
    start, count = rank_share(weight)
    kept = weight.ds_tensor
    if kept.numel() < count or hasattr(kept, "ds_quant_scale"):
        if piece is not None:
            return None
        raise LookupError("DeepSpeed keeps it in a file, or quantized")
    if not count:
        return None
    if weight.ds_status is ZeroParamStatus.AVAILABLE:
        return Share(start, weight.data.reshape(-1).narrow(0, start, count))
    return Share(start, kept.narrow(0, 0, count))
