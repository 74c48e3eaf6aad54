"""Stand-ins for the fused operations of GPUs in a trace on fake tensors: they save tensors that the
operations of CPUs do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from framework.setup.trace_ledger import Ledger, num_bytes


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[-1] == value.shape[-1]:
            output = torch.empty_like(query)
        else:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class _FusedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(value, dtype=torch.bool))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, value.new_empty(value.shape[:-1], dtype=torch.float32), weight)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient), torch.empty_like(ctx.saved_tensors[2])


class AsOnGPU(TorchFunctionMode):
    """Replaces attention, dropout and RMSNorm by stand-ins for the fused operations of GPUs."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(args, kwargs)
        output = None
        if func is functional.dropout:
            output = self._dropout(inspect.signature(func).bind(*args, **kwargs).arguments)
        elif func is functional.rms_norm:
            output = self._rms_norm(inspect.signature(func).bind(*args, **kwargs).arguments)
        if output is None:
            return func(*args, **kwargs)
        return output

    def _dropout(self, arguments: Mapping[str, Any]) -> Any:
        """Count a dropout, and return the output of its stand-in; None where it drops nothing, or
        all.
        """
        if not arguments.get("training", True) or not 0 < arguments.get("p", 0.5) < 1:
            return None
        value = arguments["input"]
        # Read and written, and a mask of one byte for each element.
        self._count_moved(2 * num_bytes(value) + value.numel())
        return _FusedDropout.apply(value)

    def _rms_norm(self, arguments: Mapping[str, Any]) -> Any:
        """Count an RMSNorm, and return the output of its stand-in; None where it has no weight."""
        if arguments.get("weight") is None:
            return None
        self._count_moved(2 * num_bytes(arguments["input"]))
        return _FusedNorm.apply(arguments["input"], arguments["weight"])

    def _count_moved(self, moved_bytes: int) -> None:
        figures = self._ledger.current.figures
        figures["operations"] += 1
        figures["moved"] += moved_bytes

    def _attention(self, args: Any, kwargs: Any) -> Any:
        """Count the operations of an attention, and return the output of its stand-in."""
        operands = list(args)
        operands += [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
        query, key, value = operands[:3]
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        size = query.shape[-1]
        is_causal = kwargs.get("is_causal", args[5:6] == (True,))  # the sixth argument
        # Two products: of queries and keys, and of their scores and the values.
        flops = 2 * query.numel() // size * key.shape[-2] * (size + value.shape[-1])
        causal_length = query.shape[-2] if is_causal else 0
        self._ledger.count_scores(flops, (query, key, value), causal_length)
        output = _FusedAttention.apply(query, key, value)
        log_sums_bytes = 4 * query.numel() // size
        figures = self._ledger.current.figures
        figures["operations"] += 1
        figures["products"] += num_bytes(output) + log_sums_bytes
        return output
