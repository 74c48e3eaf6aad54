"""Several linear layers of one input, such as query, key and value, in as few products as pay.

The layers keep their weights and names, so that checkpoints, published names, adapters, patterns
of weights and divisions over ranks stay as with separate layers. Joined, they are one product
forward, and one for each gradient backward. Their weights are joined

- without a copy where they lie one after the other in memory, as in the flat buffers of ZeRO 1
  and 2;
- by the copy in half precision that autocast makes of them anyway;
- by a copy, where that is little against what the products read and write.

Elsewhere each layer has its own product, but the gradient of the input is summed up by the
products themselves, in place of additions after them. Compiled graphs get the plain layers:
there, what follows adds their gradients up as it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.nn.modules.module import _has_any_global_hook

from framework.models.split import ColumnLinear

# A copy of the weights may take this share of the bytes that the products read and write.
_WORTH_A_COPY: Final = 1 / 16
_HOOKS: Final = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def apply_linears(input: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return what each layer makes of `input` (..., in_features).

    The results may be parts of one tensor: nothing may write to them in place, and what autograd
    saves of one keeps the others in memory (`apart`).
    """
    if not _may_join(input, layers):
        return tuple(layer(input) for layer in layers)
    if _has_no_memory(input):  # a trace of the planner: where weights lie is not known
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return tuple(layer(input) for layer in layers)
    for layer in layers:
        for hook in layer._forward_pre_hooks.values():
            hook(layer, (input,))
    first = layers[0]
    if isinstance(first, ColumnLinear) and first.copies:
        input = first.part.copy_once(input)
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    outputs: tuple[Tensor, ...] = _Linears.apply(input, len(layers), *(weights + biases))
    if isinstance(first, ColumnLinear):
        first.part.begin(draws=first.training)
    return outputs


def apart(output: Tensor) -> Tensor:
    """Return a result of `apply_linears` in memory of its own, where a backward pass needs it and
    not the others.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _has_no_memory(output):
        return output
    if output.untyped_storage().nbytes() == output.nbytes:
        return output
    return output.clone()


def _may_join(input: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Check whether layers do nothing but multiply, and whether nothing looks on: no adapter, no
    hook (as those by which ZeRO-3 gathers weights) and no compiler.
    """
    if torch.compiler.is_compiling() or not _is_bare(input):
        return False
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    forms = set()
    numbers = set()
    for layer in layers:
        if not isinstance(layer, nn.Linear) or not _is_plain(layer):
            return False
        weight = layer.weight
        if not _is_bare(weight) or hasattr(weight, "ds_id"):
            return False
        forms.add((vars(layer).get("part"), layer.bias is None))
        numbers.add((weight.dtype, weight.device))
    if len(forms) > 1 or len(numbers) > 1:
        return False
    # autocast casts float32, and leaves float64 as it is
    is_cast = torch.is_autocast_enabled(input.device.type) and weight.dtype == torch.float32
    return is_cast or (input.dtype, input.device) in numbers


def _is_bare(tensor: Tensor) -> bool:
    """Check whether a tensor is no wrapper of another one; those without memory, as which the
    planner traces a model, are none.
    """
    return type(tensor) in (Tensor, nn.Parameter) or _has_no_memory(tensor)


def _has_no_memory(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def _is_plain(layer: nn.Linear) -> bool:
    if isinstance(layer, ColumnLinear):
        is_own = type(layer).forward is ColumnLinear.forward and not layer.is_last
    else:
        is_own = type(layer).forward is nn.Linear.forward
    attributes = vars(layer)
    if not is_own or "forward" in attributes or attributes.get("_compiled_call_impl"):
        return False
    if any(attributes[name] for name in _HOOKS):
        return False
    # What only notes the call is called here as well. It is removed after a first pass, and the
    # backward pass of that, which may run layers again, must find the same products.
    pre_hooks = attributes["_forward_pre_hooks"].values()
    return all(getattr(hook, "observes", False) for hook in pre_hooks)


class _Linears(torch.autograd.Function):
    """Products of one input (..., in_features) with several weights, and their gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, count: int, *tensors: Any) -> Any:
        """Compute (..., out_features) for each of `count` weights, which the biases follow."""
        weights: Sequence[Tensor] = tensors[:count]
        biases: Sequence[Any] = [each for each in tensors[count:] if each is not None]
        ctx.input_dtype = input.dtype
        ctx.weight_dtype = weights[0].dtype
        device = input.device.type
        if torch.is_autocast_enabled(device) and ctx.weight_dtype == torch.float32:
            dtype = torch.get_autocast_dtype(device)
            input = input.to(dtype)
            weights = _rows_in(dtype, weights)
            if biases:
                biases = _rows_in(dtype, biases)
        ctx.shape = input.shape
        ctx.sizes = [len(weight) for weight in weights]
        needs = ctx.needs_input_grad
        saved: list[Tensor | None] = [input if any(needs[2 : 2 + count]) else None]
        if needs[0]:
            saved += weights
        ctx.save_for_backward(*saved)
        with torch.autocast(device, enabled=False):
            joined = _joined_weights(weights, input.numel() // input.shape[-1])
            ctx.is_joined = joined is not None
            if joined is None:
                pairs = zip_longest(weights, biases)
                return tuple(linear(input, weight, bias) for weight, bias in pairs)
            output = linear(input, joined, _joined(biases, dim=0) if biases else None)
            return torch.split(output, ctx.sizes, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: a layer that is recomputed gives them once alone
        input = saved[0]
        weights = saved[1:]
        needs_input = ctx.needs_input_grad[0]
        needs_weight = ctx.needs_input_grad[2 : 2 + len(ctx.sizes)]
        needs_bias = ctx.needs_input_grad[2 + len(ctx.sizes) :]
        # If some of the layers are frozen, the gradients of each are computed by themselves.
        is_joined = ctx.is_joined and len(set(needs_weight)) == len(set(needs_bias)) == 1
        parts = list(gradients)
        if is_joined:
            parts = [_joined(gradients, dim=-1)]
            needs_weight = needs_weight[:1]
            needs_bias = needs_bias[:1]
            if needs_input:
                weights = [_joined(weights, dim=0)]
        parts = [part.reshape(-1, part.shape[-1]) for part in parts]
        of_input: Tensor | None = None
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        with torch.autocast(gradients[0].device.type, enabled=False):
            if needs_input:
                of_input = _summed_products(parts, weights).view(ctx.shape).to(ctx.input_dtype)
            for number, part in enumerate(parts):
                of_weight = (
                    part.T @ input.reshape(-1, ctx.shape[-1]) if needs_weight[number] else None
                )
                of_weights.append(of_weight)
                of_biases.append(part.sum(0) if needs_bias[number] else None)
        of_tensors = _of_layers(of_weights, ctx) + _of_layers(of_biases, ctx)
        return (of_input, None, *of_tensors)


def _of_layers(gradients: list[Tensor | None], ctx: Any) -> list[Tensor | None]:
    """Return gradients of weights or biases, one for each layer, in the type of the weights."""
    if len(gradients) < len(ctx.sizes):
        if gradients[0] is None:
            return [None for _ in ctx.sizes]
        gradients = list(torch.split(gradients[0], ctx.sizes))
    return [None if each is None else each.to(ctx.weight_dtype) for each in gradients]


def _rows_in(dtype: torch.dtype, tensors: Sequence[Any]) -> list[Tensor]:
    """Copy tensors into one, one after the other in another type; return its parts."""
    sizes = [len(tensor) for tensor in tensors]
    first = tensors[0]
    joined = first.new_empty((sum(sizes), *first.shape[1:]), dtype=dtype)
    parts = list(torch.split(joined, sizes))
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return parts


def _joined_weights(weights: Sequence[Tensor], num_rows: int) -> Tensor | None:
    """Return weights (outputs, inputs) as one, or None where a copy costs too much for an input
    of `num_rows` rows.
    """
    outputs = sum(map(len, weights))
    inputs = weights[0].shape[1]
    copied = 2 * outputs * inputs
    moved = num_rows * (inputs + outputs)
    if copied > _WORTH_A_COPY * moved:
        return _seen_as_one(weights, dim=0)
    return _joined(weights, dim=0)


def _joined(tensors: Sequence[Tensor], *, dim: int) -> Tensor:
    """Return tensors as one along a dimension, without a copy if they lie so in memory."""
    joined = _seen_as_one(tensors, dim=dim)
    return torch.cat(list(tensors), dim=dim) if joined is None else joined


def _seen_as_one(tensors: Sequence[Tensor], *, dim: int) -> Tensor | None:
    """Return tensors that lie in memory as parts of one, in this order along a dimension, as that
    one; None if they do not.
    """
    first = tensors[0]
    strides = first.stride()
    storage = first.untyped_storage().data_ptr()
    end = first.storage_offset()
    size = 0
    for tensor in tensors:
        if tensor.storage_offset() != end or tensor.stride() != strides:
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        size += tensor.shape[dim]
        end += tensor.shape[dim] * strides[dim]
    shape = list(first.shape)
    shape[dim] = size
    is_apart = dim == -1 and first.ndim > 1 and size > strides[-2]
    if is_apart:  # the parts are rows of their own, which only happen to follow each other
        return None
    return first.as_strided(shape, strides)


def _summed_products(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Add up gradients (rows, outputs) times weights (outputs, inputs), in the order in which
    autograd would: the last layer's first.
    """
    total = gradients[-1] @ weights[-1]
    for gradient, weight in zip(reversed(gradients[:-1]), reversed(weights[:-1]), strict=True):
        total.addmm_(gradient, weight)
    return total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up; where the two are parts of one tensor (`apply_linears`), so are
    their gradients, and the products' own backward pass copies none of them.
    """
    is_plain = torch.compiler.is_compiling() or _has_no_memory(gate)
    if is_plain or _seen_as_one((gate, up), dim=-1) is None:
        return silu(gate) * up
    product: Tensor = _SwiGLU.apply(gate, up)
    return product


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        opened = silu(gate)
        ctx.save_for_backward(gate, up, opened)
        return opened * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, opened = ctx.saved_tensors
        width = gate.shape[-1]
        joined = gate.new_empty((*gate.shape[:-1], 2 * width))
        gate_gradient, up_gradient = torch.split(joined, width, dim=-1)
        torch.mul(gradient, opened, out=up_gradient)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
        return gate_gradient, up_gradient
