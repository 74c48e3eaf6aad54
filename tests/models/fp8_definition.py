"""Linear layers in fp8 by fp8's own definition, in plain PyTorch: what `precision.fp8` is held
against.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def rounded(tensor: Tensor, dtype: torch.dtype, scaling: str, axis: int) -> Tensor:
    """Round to fp8 at a scale, and return the numbers that were meant, in fp32."""
    largest = torch.finfo(dtype).max
    if scaling == "tensorwise":
        scale = (largest / tensor.abs().max().double()).float()
    else:
        most = tensor.abs().amax(axis, keepdim=True).double().clamp(min=1e-12)  # a row may be zero
        scale = torch.exp2((largest / most).float().log2().floor())
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


def product(one: Tensor, other: Tensor, scaling: str, *, of_gradient: bool = False) -> Tensor:
    """Multiply (n, k) by (k, m); the first is a gradient of outputs, which tensorwise has a type
    for its range.
    """
    dtype = E5M2 if of_gradient and scaling == "tensorwise" else E4M3
    first = rounded(one, dtype, scaling, axis=1)
    return (first @ rounded(other, E4M3, scaling, axis=0)).to(one.dtype)


class Defined(torch.autograd.Function):
    """A linear layer without bias: the product and its two gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.scaling = scaling
        return product(input.flatten(0, -2), weight.t(), scaling).view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_input = product(rows, weight, ctx.scaling, of_gradient=True).view(input.shape)
        of_weight = product(rows.t(), input.flatten(0, -2), ctx.scaling, of_gradient=True)
        return of_input, of_weight, None


def define(layers: Iterable[nn.Linear], scaling: str = "tensorwise") -> None:
    """Let layers compute by the definition."""

    def forward_of(layer: nn.Linear) -> Any:
        def forward(input: Tensor) -> Tensor:
            output: Tensor = Defined.apply(input, layer.weight, scaling)
            return output if layer.bias is None else output + layer.bias

        return forward

    for layer in layers:
        vars(layer)["forward"] = forward_of(layer)
