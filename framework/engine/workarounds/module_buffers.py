"""Buffers of a model (the running statistics of batch norm), made the same on all data-parallel
ranks.

DeepSpeed up to 0.19.8 broadcasts parameters only (runtime/engine.py `_broadcast_model`). Each
rank's own micro-batches move buffers apart, and a checkpoint holds the first rank's buffers. Here
they are made equal before they are measured or saved, as torch's DistributedDataParallel does
before every step: the checkpoint has the buffers that were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import deepspeed
import torch
import torch.distributed

_BUCKET_BYTES: Final = 1 << 26


def share_buffers(engine: deepspeed.DeepSpeedEngine, *, unsaved: bool = False) -> None:
    """Give every rank the buffers that the first of its data-parallel group has, in place.
    Collective.

    Args:
        engine: its module holds a whole model, or a stage of a pipeline.
        unsaved: share buffers as well that no checkpoint holds. They are made with the model, and
            can be large (masks).
    """
    group = engine.data_parallel_group
    if torch.distributed.get_world_size(group) == 1:
        return
    first = torch.distributed.get_global_rank(group, 0)
    with torch.no_grad():
        for buffers in _buckets(_buffers(engine.module, unsaved=unsaved)):
            flat = torch.cat([_as_bytes(buffer).to(engine.device) for buffer in buffers])
            torch.distributed.broadcast(flat, first, group=group)
            pieces = torch.split(flat, [buffer.nbytes for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


def _buffers(module: torch.nn.Module, *, unsaved: bool) -> list[torch.Tensor]:
    """List each buffer once, the widest numbers first: so each of them begins at a multiple of its
    element size when they lie end to end.
    """
    buffers: dict[torch.Tensor, None] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is None or not buffer.numel() or _is_expanded(buffer):
                continue
            if unsaved or name not in part._non_persistent_buffers_set:
                buffers[buffer] = None
    return sorted(buffers, key=lambda buffer: -buffer.element_size())


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Check whether several elements are one number in memory, which cannot be written: a constant
    that the model was made with.
    """
    strides = zip(buffer.stride(), buffer.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in strides)


def _buckets(buffers: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut buffers into lists of at most `_BUCKET_BYTES`, or one buffer."""
    bucket: list[torch.Tensor] = []
    size = 0
    for buffer in buffers:
        if bucket and size + buffer.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = []
            size = 0
        bucket.append(buffer)
        size += buffer.nbytes
    if bucket:
        yield bucket
