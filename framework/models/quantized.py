"""Frozen linear layers in 4 or 8 bits under adapters: QLoRA (Dettmers et al. 2023).

A layer keeps one row of bytes, its codes and after them its scales in fp32, as a weight without a
gradient: ZeRO sends and partitions it as any other, and no cast to another precision reaches it.
Both passes make the matrix anew, and autograd keeps the bytes alone.

- ``nf4``: 16 levels, at the quantiles of a normal distribution; a scale for each 64 numbers.
- ``int8``: 255 equal steps; a scale for each row.

A rank of a tensor group has the codes of its part of the matrix, and their scales: of ``nf4`` all
blocks that its part reaches into.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from framework.config.groups import NUMBERS_OF_A_BLOCK
from framework.config.training import Quantization
from framework.models.split import ColumnLinear, RowLinear

# Dettmers et al. 2023, appendix E.
_LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BYTES_OF_A_BLOCK: Final = NUMBERS_OF_A_BLOCK // 2
"""Bytes of the codes of an ``nf4`` block."""
_LARGEST: Final = 127  # of an int8, the same on both sides of zero


def quantize(weight: Tensor, form: Quantization) -> Tensor:
    """Return the bytes of a matrix: codes, and after them the scales in fp32."""
    numbers = weight.detach().float()
    if form == "int8":
        scales = numbers.abs().amax(dim=1) / _LARGEST
        steps = numbers / _not_zero(scales)[:, None]
        codes = steps.round().to(torch.int8).flatten().view(torch.uint8)
        return torch.cat([codes, scales.view(torch.uint8)])
    flat = numbers.flatten()
    if len(flat) % NUMBERS_OF_A_BLOCK:
        flat = pad(flat, (0, -len(flat) % NUMBERS_OF_A_BLOCK))
    blocks = flat.view(-1, NUMBERS_OF_A_BLOCK)
    scales = blocks.abs().amax(dim=1)
    levels = torch.tensor(_LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    shares = blocks / _not_zero(scales)[:, None]
    nearest = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)
    pairs = nearest.view(-1, 2)
    codes = (pairs[:, 0] << 4) | pairs[:, 1]
    return torch.cat([codes, scales.view(torch.uint8)])


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


class Kept(NamedTuple):
    """Numbers of ``nf4`` blocks that are a rank's part of a matrix.

    Attributes:
        rows: lines of blocks; the same numbers are kept of each.
        spans: first number of each stretch that is kept of a line, and the one after its last.
    """

    rows: int
    spans: tuple[tuple[int, int], ...]

    def of(self, numbers: Tensor) -> Tensor:
        """Return the kept numbers of blocks, line by line."""
        lines = numbers.view(self.rows, -1)
        return torch.cat([lines[:, begin:end] for begin, end in self.spans], dim=1)


def dequantize(
    held: Tensor,
    shape: tuple[int, int],
    form: Quantization,
    dtype: torch.dtype,
    kept: Kept | None = None,
) -> Tensor:
    """Return the matrix (rows, columns) of such bytes, computed in fp32 and rounded to `dtype`;
    of a rank's part in ``nf4`` what is `kept` of its blocks.
    """
    rows, columns = shape
    if form == "int8":
        codes = held[: rows * columns].view(torch.int8).view(rows, columns)
        return (codes.float() * _scales(held, rows * columns)[:, None]).to(dtype)
    num_codes = num_blocks(held) * BYTES_OF_A_BLOCK
    codes = held[:num_codes]
    levels = torch.tensor(_LEVELS, device=held.device)
    pairs = torch.stack((codes >> 4, codes & 15), dim=-1)
    blocks = levels[pairs.int()].view(-1, NUMBERS_OF_A_BLOCK)
    numbers = blocks * _scales(held, num_codes)[:, None]
    if kept is not None:
        numbers = kept.of(numbers)
    return numbers.flatten()[: rows * columns].view(rows, columns).to(dtype)


def num_blocks(held: Tensor) -> int:
    """Count the ``nf4`` blocks of some bytes."""
    return held.numel() // (BYTES_OF_A_BLOCK + torch.float32.itemsize)


def _scales(held: Tensor, start: int) -> Tensor:
    # A copy: gathered bytes may begin anywhere, and fp32 numbers may not.
    return held[start:].clone().view(torch.float32)


class InFewBits(nn.Linear):
    """A linear layer that is never trained, with its matrix in few bits.

    Attributes:
        shape: rows and columns of the matrix.
        form: of its bytes.
        kept: numbers of its blocks that are the matrix; None: all.
    """

    shape: tuple[int, int]
    form: Quantization
    kept: Kept | None = None

    def hold(self, held: Tensor, form: Quantization, kept: Kept | None = None) -> None:
        """Keep these bytes for the matrix."""
        self.shape = (self.out_features, self.in_features)
        self.form = form
        self.kept = kept
        self.weight = nn.Parameter(held, requires_grad=False)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        layout = (self.shape, self.form, self.kept)
        output: Tensor = _Product.apply(input, self.weight, bias, layout)
        return output

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, rounded to `dtype`."""
        return _matrix(self.weight.detach(), (self.shape, self.form, self.kept), dtype)


class QuantizedLinear(InFewBits):
    """`nn.Linear` in few bits."""

    def __init__(self, of: nn.Linear, form: Quantization, *, dtype: torch.dtype) -> None:
        """Take the place of a whole layer, its numbers first rounded to `dtype`."""
        nn.Module.__init__(self)
        self.in_features = of.in_features
        self.out_features = of.out_features
        self.hold(quantize(of.weight.detach().to(dtype), form), form)
        self.bias = of.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.product(input, self.bias)


class QuantizedColumn(InFewBits, ColumnLinear):
    """`ColumnLinear` in few bits: a rank's outputs."""


class QuantizedRow(InFewBits, RowLinear):
    """`RowLinear` in few bits: a rank's inputs."""


class _Product(torch.autograd.Function):
    """A product with a matrix in few bits, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, held: Tensor, bias: Tensor | None, layout: Any) -> Tensor:
        device = input.device.type
        dtype = input.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        ctx.save_for_backward(held)
        ctx.layout = layout
        ctx.dtype = dtype
        ctx.input_dtype = input.dtype
        if bias is not None:
            bias = bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return linear(input.to(dtype), _matrix(held, layout, dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (held,) = ctx.saved_tensors
        matrix = _matrix(held, ctx.layout, ctx.dtype)
        of_input = (gradients[0].to(ctx.dtype) @ matrix).to(ctx.input_dtype)
        return of_input, None, None, None


def _matrix(held: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    """Return the matrix of bytes with the shape, form and kept numbers of an `InFewBits`."""
    shape, form, kept = layout
    return dequantize(held, shape, form, dtype, kept)


_PRODUCTS: Final = (nn.Linear.forward, ColumnLinear.forward, RowLinear.forward)


def quantizable(model: nn.Module) -> dict[str, Any]:
    """Return name -> module of the adapted modules over a linear layer."""
    from peft.tuners.lora import LoraLayer

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            base = module.get_base_layer()
            if isinstance(base, nn.Linear) and type(base).forward in _PRODUCTS:
                found[name] = module
    return found


def put_plain(model: nn.Module, dtype: torch.dtype) -> None:
    """Put plain layers in the place of those in few bits, with the numbers that these computed
    with in `dtype`, in fp32.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QuantizedLinear):
                plain = nn.Linear(1, 1, bias=False)
                plain.in_features = child.in_features
                plain.out_features = child.out_features
                plain.weight = nn.Parameter(child.matrix(dtype).float(), requires_grad=False)
                plain.bias = child.bias
                setattr(module, name, plain)
