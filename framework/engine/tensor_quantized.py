"""Layers of a tensor group under adapters in few bits.

The whole matrix is put into few bits, as in one process, and each rank keeps its part of the codes
and their scales: so a run has the same numbers at every size of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from framework.checkpoint.state.tensor_split import Split
from framework.checkpoint.state.weight_parts import split_of
from framework.config.groups import NUMBERS_OF_A_BLOCK
from framework.config.training import Quantization
from framework.engine.distributed import device
from framework.engine.fingerprint import note_whole
from framework.errors import ConfigError
from framework.models.quantized import (
    BYTES_OF_A_BLOCK,
    Kept,
    QuantizedColumn,
    QuantizedRow,
    dequantize,
    num_blocks,
    quantize,
)
from framework.models.split import ColumnLinear, DividedLinear, TensorPart


def quantize_part(
    layer: DividedLinear, form: Quantization, *, dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor]:
    """Put a divided layer into few bits, in its place. Collective.

    Args:
        layer: its weight not partitioned by ZeRO.
        form: of the bytes.
        dtype: to which the numbers are rounded first.
        name: of the layer.

    Returns:
        The whole matrix, and what few bits have of it, both in fp32.

    Raises:
        ConfigError: kind ``lora-not-adaptable``: rows that a row layer divides are no whole blocks.
    """
    split = split_of(layer.weight)
    assert split is not None
    whole = whole_of(layer.weight.detach().to(dtype), split, layer.part)
    held = quantize(whole, form)
    rows, columns = whole.shape
    kept: Kept | None = None
    bounds = list(split.bounds(layer.part.rank, layer.part.size))
    if form == "int8":
        part = _rows_in_bytes(held, (rows, columns), split.dim, bounds)
    elif split.dim == 0:
        spans = [(begin * columns, end * columns) for begin, end in bounds]
        part, kept = _blocks(held, 1, spans)
    elif columns % NUMBERS_OF_A_BLOCK == 0:
        part, kept = _blocks(held, rows, bounds)
    else:
        reason = (
            f"nf4 has a scale for each {NUMBERS_OF_A_BLOCK} numbers, and {name} divides rows of "
            f"{columns} numbers, which are no multiple of that"
        )
        fix = "set int8, which has a scale for each row, or parallel.tensor: 1"
        key = "training.lora.quantization"
        raise ConfigError.of("lora-not-adaptable", reason, fix, key, form)
    in_few_bits: Any = layer
    if isinstance(layer, ColumnLinear):
        in_few_bits.__class__ = QuantizedColumn
    else:
        in_few_bits.__class__ = QuantizedRow
    in_few_bits.hold(part, form, kept)
    note_whole(in_few_bits.weight, held)
    return whole.float(), dequantize(held, (rows, columns), form, torch.float32)


def whole_of(weight: Tensor, split: Split, part: TensorPart) -> Tensor:
    """Return the whole of a weight from the parts of a tensor group, where the weight lies.
    Collective.
    """
    whole_shape = split.whole_shape(weight.shape)
    shapes = [split.part_shape(whole_shape, rank, part.size) for rank in range(part.size)]
    width = max(shape.numel() for shape in shapes)
    # On the device: NCCL sends nothing else, and below stage 3 the model is in host memory yet.
    flat = nn.functional.pad(weight.flatten().to(device()), (0, width - weight.numel()))
    flat_parts = [torch.empty_like(flat) for _ in shapes]
    torch.distributed.all_gather(flat_parts, flat, group=part.group)
    parts = []
    for shape, flat_part in zip(shapes, flat_parts, strict=True):
        parts.append(flat_part[: shape.numel()].view(shape))
    return split.whole(parts).to(weight.device)


def _rows_in_bytes(
    held: Tensor, shape: tuple[int, int], dim: int, bounds: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the bytes of some rows or columns of a matrix in ``int8``."""
    rows, columns = shape
    codes = _stretches(held[: rows * columns].view(rows, columns), bounds, dim=dim)
    scales = held[rows * columns :].view(rows, -1)
    if dim == 0:
        scales = _stretches(scales, bounds, dim=0)
    return torch.cat([codes.flatten(), scales.flatten()])


def _blocks(held: Tensor, lines: int, bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, Kept]:
    """Return the bytes of the ``nf4`` blocks with some stretches of numbers of each line, and where
    these numbers are in them.
    """
    blocks = []
    spans = []
    num_before = 0  # numbers of the blocks that are taken
    for begin, end in bounds:
        first = begin // NUMBERS_OF_A_BLOCK
        stop = -(-end // NUMBERS_OF_A_BLOCK)
        shift = num_before - first * NUMBERS_OF_A_BLOCK
        blocks.append((first, stop))
        spans.append((begin + shift, end + shift))
        num_before += (stop - first) * NUMBERS_OF_A_BLOCK
    num_codes = num_blocks(held) * BYTES_OF_A_BLOCK
    codes = _stretches(held[:num_codes].view(lines, -1, BYTES_OF_A_BLOCK), blocks, dim=1)
    scales = _stretches(held[num_codes:].view(lines, num_blocks(held) // lines, -1), blocks, dim=1)
    part = torch.cat([codes.flatten(), scales.flatten()])
    return part, Kept(lines, tuple(spans))


def _stretches(tensor: Tensor, bounds: Sequence[tuple[int, int]], *, dim: int) -> Tensor:
    """Join stretches of a tensor along one dimension."""
    return torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in bounds], dim=dim)
